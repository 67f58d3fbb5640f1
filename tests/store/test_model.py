"""All verbs against the model: the same answers, the same state after every call, on three servers."""

from __future__ import annotations

import os

import pytest

from broker.store import Store
from tests.support.machine import adapting_walk, run_machine, walk

SCALE = 10 if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else 1


@pytest.mark.timeout(180 * SCALE)
def test_random_calls_that_hypothesis_draws_and_shortens(any_store: Store) -> None:
    run_machine(any_store, examples=40 * SCALE)


@pytest.mark.timeout(180 * SCALE)
def test_a_long_walk(any_store: Store) -> None:
    walk(any_store, runs=40 * SCALE)


@pytest.mark.timeout(180 * SCALE)
def test_slots_that_adapt_under_load_that_lasts(any_store: Store) -> None:
    adapting_walk(any_store, runs=SCALE)
