"""Runs of the model: by hypothesis, which shortens what it found, and by a seeded walk, the same every time."""

from __future__ import annotations

import random
from typing import cast

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from broker.store import Store
from tests.support.caller import (
    Call,
    Caller,
    Choose,
    adapting_fleet,
    any_call,
    any_fleet,
    any_policies,
    saturation,
)
from tests.support.model_state import Policies


def _chooser(draw: st.DrawFn) -> Choose:
    return cast(Choose, lambda options: draw(st.sampled_from(options)))


@st.composite
def policies(draw: st.DrawFn) -> object:
    return any_policies(_chooser(draw))


@st.composite
def fleets(draw: st.DrawFn) -> object:
    return any_fleet(_chooser(draw))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    return any_call(_chooser(draw))


class Machine(RuleBasedStateMachine):
    """One rule for all calls: of many rules hypothesis switches half off in a run, and some states need most verbs."""

    store: Store
    caller: Caller

    @initialize(policies=policies(), fleet=fleets())
    def start(self, policies: object, fleet: object) -> None:
        self.caller = Caller(self.store, policies, fleet)  # type: ignore[arg-type]  # as drawn

    @rule(call=calls())
    def play(self, call: Call) -> None:
        self.caller.play(call)


def run_machine(store: Store, *, examples: int, steps: int = 40, repeatable: bool = True) -> None:
    """Raises AssertionError with the shortest sequence of calls it found. `repeatable`: the same runs every time."""
    machine = type("Machine", (Machine,), {"store": store})
    wanted = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=repeatable, database=None,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False, phases=(Phase.generate, Phase.shrink),
        print_blob=not repeatable,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=wanted)


def adapting_walk(store: Store, *, runs: int, steps: int = 12, seed: int = 1) -> None:
    """One endpoint under load that lasts, for steps of `max_concurrent: auto` that `walk` hardly ever reaches."""
    for one in range(seed, seed + runs):
        choose = random.Random(one).choice
        try:
            caller = Caller(store, Policies(), adapting_fleet(choose))
            for _ in range(steps):
                pause = choose((0.0,) * 7 + (1.0,))
                caller.play(("saturate", saturation(choose, choose((9, 30, 60)), pause)))
                caller.play(("advance", {"ms": choose((0, 500, 1000, 130_000))}))
                if not choose(range(6)):
                    caller.play(("register", {"fleet": adapting_fleet(choose)}))
        except Exception as error:
            error.add_note(f"adapting walk with seed {one}")
            raise


def walk(store: Store, *, runs: int, steps: int = 60, seed: int = 1) -> None:
    """Raises AssertionError; its notes name the run's seed."""
    for one in range(seed, seed + runs):
        choose = random.Random(one).choice
        try:
            caller = Caller(store, any_policies(choose), any_fleet(choose))
            for _ in range(steps):
                caller.play(any_call(choose))
        except Exception as error:
            error.add_note(f"walk with seed {one}")
            raise
