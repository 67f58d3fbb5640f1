from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.configmodel import Retry
from broker.errors import BrokerUnavailable
from workers.errors import RULES, AttemptFailed, FailureKind
from workers.retry import DeadLetter, Decision, Release, RetryIn, decide, redis_guard, redis_guard_sync

SETTINGS = Retry(max_attempts=3, backoff_initial=0.5, backoff_max=30.0)


class Highest:
    """A generator that always gives the upper end."""

    def uniform(self, a: float, b: float, /) -> float:
        assert a == 0
        return b


class Lowest:
    def uniform(self, a: float, b: float, /) -> float:
        return a


def failed(kind: FailureKind = "http_5xx", retry_after: float | None = None) -> AttemptFailed:
    return AttemptFailed(kind, "status 503", status=503, retry_after=retry_after)


def decision(
    failure: AttemptFailed, attempt: int = 1, most: int = 3, left: float | None = None, rng: object = None
) -> Decision:
    return decide(SETTINGS, failure, attempt, most, left, Highest() if rng is None else rng)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attempt", "window"), [(1, 0.5), (2, 1.0), (3, 2.0), (6, 16.0), (7, 30.0), (99, 30.0), (5000, 30.0)]
)
def test_the_window_doubles_up_to_the_maximum(attempt: int, window: float) -> None:
    assert decision(failed(), attempt, most=10_000) == RetryIn(window)


@given(st.integers(1, 50), st.integers())
def test_jitter_is_full(attempt: int, seed: int) -> None:
    got = decision(failed(), attempt, most=100, rng=random.Random(seed))
    assert isinstance(got, RetryIn)
    assert 0 <= got.delay_s <= min(30.0, 0.5 * 2 ** (attempt - 1))


def test_the_same_seed_gives_the_same_delays_and_another_another() -> None:
    one, two, other = (decision(failed(), rng=random.Random(seed)) for seed in (1, 1, 2))
    assert one == two != other


def test_the_last_attempt_ends_in_a_dead_letter_that_says_so() -> None:
    assert isinstance(decision(failed(), attempt=2), RetryIn)
    assert decision(failed(), attempt=3) == DeadLetter("attempt 3 of 3 failed: http_5xx: status 503")
    assert isinstance(decision(failed(), attempt=4), DeadLetter)
    assert isinstance(decision(failed(), attempt=1, most=1), DeadLetter)


@pytest.mark.parametrize("kind", get_args(FailureKind))
def test_the_table_decides(kind: FailureKind) -> None:
    expected = {"retry": RetryIn, "dead_letter": DeadLetter, "pause": Release}[RULES[kind].action]
    assert isinstance(decision(failed(kind)), expected)


def test_a_dead_letter_at_once_names_the_failure() -> None:
    assert decision(failed("http_4xx")) == DeadLetter("http_4xx: status 503")


def test_a_rate_limit_releases_for_as_long_as_asked_even_after_the_last_attempt() -> None:
    assert decision(failed("rate_limited"), attempt=3) == Release(1.0)
    assert decision(failed("rate_limited", 7.0), attempt=3) == Release(7.0)
    assert decision(failed("rate_limited", 0.0)) == Release(0.5), "asked at once it would be asked without end"
    assert decision(failed("rate_limited", 1e9)) == Release(600.0)
    assert decision(failed("rate_limited", 60.0), left=2.0) == Release(60.0)


def test_retry_after_is_honoured_and_never_shortens_the_backoff() -> None:
    assert decision(failed(retry_after=60.0)) == RetryIn(60.0, pause_s=60.0)
    assert decision(failed(retry_after=0.1)) == RetryIn(0.5, pause_s=0.1)


def test_a_delay_takes_at_most_half_of_what_is_left() -> None:
    assert decision(failed(retry_after=60.0), left=20.0) == RetryIn(10.0, pause_s=60.0)
    assert decision(failed(), attempt=7, most=9, left=20.0) == RetryIn(10.0)
    assert decision(failed(), left=20.0) == RetryIn(0.5)


def test_past_the_deadline_the_store_is_left_to_expire_it() -> None:
    assert decision(failed(), left=0.0) == RetryIn(0.0)
    assert decision(failed(), left=-5.0) == RetryIn(0.0)


# The guard


def flaky(times: int, error: BaseException) -> tuple[Callable[[], Awaitable[str]], list[int]]:
    calls: list[int] = []

    async def call() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "done"

    return call, calls


def test_the_guard_waits_for_redis_and_tells() -> None:
    call, calls = flaky(12, BrokerUnavailable("redis: refused"))
    told: list[tuple[int, float]] = []

    async def run() -> str:
        async def no_sleep(_: float) -> None: ...

        guard = redis_guard(on_wait=lambda attempt, wait, error: told.append((attempt, wait)), rng=Highest())
        return await guard.copy(sleep=no_sleep)(call)

    assert asyncio.run(run()) == "done"
    assert len(calls) == 13
    assert [attempt for attempt, _ in told] == list(range(1, 13))
    waits = [wait for _, wait in told]
    assert waits[:3] == [0.05, 0.1, 0.2]
    assert max(waits) == waits[-1] == 5.0


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("no"), KeyboardInterrupt()])
def test_the_guard_lets_everything_else_through_at_once(error: BaseException) -> None:
    call, calls = flaky(1, error)

    async def run() -> None:
        with pytest.raises(type(error)):
            await redis_guard()(call)

    asyncio.run(run())
    assert len(calls) == 1


def test_a_guarded_wait_can_be_canceled() -> None:
    async def run() -> None:
        waiting = asyncio.Event()
        call, calls = flaky(10**9, BrokerUnavailable("redis: refused"))
        guard = redis_guard(initial=600, maximum=600, rng=Highest(), on_wait=lambda *_: waiting.set())
        task: asyncio.Future[str] = asyncio.ensure_future(guard(call))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(calls) == 1

    asyncio.run(run())


def test_a_bounded_guard_raises_the_error_itself() -> None:
    call, calls = flaky(9, BrokerUnavailable("redis: refused"))

    async def run() -> None:
        await redis_guard(max_attempts=3, rng=Lowest())(call)

    with pytest.raises(BrokerUnavailable, match="refused"):
        asyncio.run(run())
    assert len(calls) == 3


class Instant:
    """An end signal that is set after so many waits, each of which takes no time."""

    def __init__(self, waits: int) -> None:
        self.left, self.slept = waits, list[float]()

    def is_set(self) -> bool:
        return self.left <= 0

    def wait(self, timeout: float, /) -> None:
        self.slept.append(timeout)
        self.left -= 1


def unavailable(times: int) -> Callable[[], str]:
    left = [times]

    def call() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise BrokerUnavailable("redis: refused")
        return "done"

    return call


def test_the_guard_for_threads() -> None:
    end = Instant(99)
    assert redis_guard_sync(end=end, rng=Highest())(unavailable(3)) == "done"
    assert end.slept == [0.05, 0.1, 0.2]


def test_the_guard_for_threads_ends_when_told() -> None:
    end = Instant(4)
    with pytest.raises(BrokerUnavailable, match="refused"):
        redis_guard_sync(end=end, rng=Lowest())(unavailable(10**9))
    assert len(end.slept) == 4
    event = threading.Event()
    event.set()
    with pytest.raises(BrokerUnavailable):
        redis_guard_sync(end=event)(unavailable(1))
