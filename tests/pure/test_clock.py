from __future__ import annotations

import time

from workers.clock import STALE_S, ServerClock


def test_it_goes_by_the_server_whatever_the_machine_says() -> None:
    clock = ServerClock()
    clock.heard((1_000_000, 500_000), time.monotonic())
    assert 1_000_000.5 <= clock.now() < 1_000_060
    clock.heard([b"2000000", b"0"], time.monotonic())
    assert 2_000_000 <= clock.now() < 2_000_060


def test_a_word_that_took_long_counts_only_if_there_is_no_other() -> None:
    clock = ServerClock()
    clock.heard((1_000_000, 0), time.monotonic() - STALE_S - 1)
    assert 1_000_000 <= clock.now() < 1_000_060
    clock.heard((5_000_000, 0), time.monotonic() - STALE_S - 1)
    assert clock.now() < 1_000_060
