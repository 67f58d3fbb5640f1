"""When is a task tried again? Decided once per failed attempt, in tenacity's terms; nothing here ever sleeps in a slot.

The delay goes to Redis (`rq:scheduled`) with the task. `redis_guard` is the only part that waits: for Redis itself.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_attempt,
    stop_never,
    wait_exponential,
    wait_random_exponential,
)

from broker.errors import BrokerUnavailable, BrokerUnsuitable
from workers.errors import DEFAULT_PAUSE_S, MAX_RETRY_AFTER_S, MIN_PAUSE_S, AttemptFailed

DEADLINE_SHARE: Final = 0.5  # of what is left: a delayed task must still have time to run


class Rng(Protocol):
    """What the jitter needs; `random.Random` has it."""

    def uniform(self, a: float, b: float, /) -> float: ...


class EndSignal(Protocol):
    """What ends a guard's wait early; `threading.Event` has it."""

    def is_set(self) -> bool: ...
    def wait(self, timeout: float, /) -> object: ...


class RetrySettings(Protocol):
    """What the policy needs of `broker.config.Retry`; the backoffs in seconds."""

    @property
    def backoff_initial(self) -> float: ...
    @property
    def backoff_max(self) -> float: ...


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Try again, elsewhere if possible. The attempt counts.

    delay_s  until the task may be claimed again
    pause_s  the endpoint asked to be left alone that long; 0.0 if it did not
    """

    delay_s: float
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Give the task up. `reason` is one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Put the task back, no attempt counted, and let the endpoint take nothing for `pause_s` seconds."""

    pause_s: float


Decision = RetryIn | DeadLetter | Release


class FullJitter(wait_random_exponential):
    """tenacity's full jitter, uniform(0, min(max, initial * 2^(attempt-1))) seconds, with the generator passed in."""

    def __init__(self, initial: float, maximum: float, rng: Rng) -> None:
        super().__init__(multiplier=initial, max=maximum)
        self.rng = rng

    def __call__(self, retry_state: RetryCallState) -> float:
        return self.rng.uniform(self.min, wait_exponential.__call__(self, retry_state))


def _is_retryable(error: BaseException) -> bool:
    return isinstance(error, AttemptFailed) and error.rule.action == "retry"


def retrying(settings: RetrySettings, max_attempts: int, rng: Rng) -> Retrying:
    """The policy as tenacity has it: stop, wait, retry. It is only ever asked, never run.

    `retry` names what is retried; a predicate that names what is not would swallow CancelledError as well.
    """
    return Retrying(
        stop=stop_after_attempt(max_attempts),
        wait=FullJitter(settings.backoff_initial, settings.backoff_max, rng),
        retry=retry_if_exception(_is_retryable),
    )


def decide(
    settings: RetrySettings,
    failure: AttemptFailed,
    attempt: int,
    max_attempts: int,
    deadline_left: float | None,
    rng: Rng,
) -> Decision:
    """What becomes of a task whose `attempt` (1-based) just failed.

    `deadline_left` in seconds, None without a deadline. Once it is 0 or less the task is retried at once: the store
    ends it as `expired`, which is its outcome, not a dead letter. A pause does not depend on one task's deadline: it is
    the endpoint's. `rng` gives the jitter.
    """
    asked = None if failure.retry_after is None else min(max(failure.retry_after, 0.0), MAX_RETRY_AFTER_S)
    if failure.rule.action == "pause":
        return Release(DEFAULT_PAUSE_S if asked is None else max(asked, MIN_PAUSE_S))
    policy = retrying(settings, max_attempts, rng)
    state = _state(policy, failure, attempt)
    if not policy.retry(state):
        return DeadLetter(str(failure))
    if policy.stop(state):
        return DeadLetter(f"attempt {attempt} of {max_attempts} failed: {failure}")
    delay = max(policy.wait(state), asked or 0.0)
    if deadline_left is not None:
        delay = min(delay, max(deadline_left, 0.0) * DEADLINE_SHARE)
    return RetryIn(delay, asked or 0.0)


def _state(policy: Retrying, failure: AttemptFailed, attempt: int) -> RetryCallState:
    state = RetryCallState(policy, fn=None, args=(), kwargs={})
    state.attempt_number = attempt
    state.set_exception((type(failure), failure, failure.__traceback__))
    return state


# What a process that runs waits out. A server that refuses it was suitable once: a password is being changed,
# rules are loaded late, another server took over.
OUTAGES: Final = (BrokerUnavailable, BrokerUnsuitable)
GUARD_INITIAL_S: Final = 0.05
GUARD_MAX_S: Final = 5.0

OnWait = Callable[[int, float, BaseException], None]


def redis_guard(
    *,
    max_attempts: int | None = None,
    initial: float = GUARD_INITIAL_S,
    maximum: float = GUARD_MAX_S,
    errors: tuple[type[Exception], ...] = OUTAGES,
    on_wait: OnWait | None = None,
    give_up: Callable[[], bool] | None = None,
    sleep: Callable[[float], Awaitable[None]] | None = None,
    rng: Rng | None = None,
) -> AsyncRetrying:
    """Waits for a Redis that is away or refuses us: `await redis_guard()(store.claim, ...)`. Only for repeatable calls.

    Retries `errors` alone, with full jitter from `initial` up to `maximum` seconds, for ever unless `max_attempts` is
    given, and then raises the last error itself. `on_wait(attempt, seconds, error)` is told before each wait.
    `give_up()` is asked after each failure, and ends it too. `sleep` waits, in seconds; it may return early.
    Everything else passes through untouched, CancelledError too. Each call starts afresh.
    """
    limit = stop_never if max_attempts is None else stop_after_attempt(max_attempts)
    guard = AsyncRetrying(
        stop=limit if give_up is None else lambda state: give_up() or limit(state),
        wait=FullJitter(initial, maximum, random.Random() if rng is None else rng),
        retry=retry_if_exception_type(errors),
        before_sleep=None if on_wait is None else _telling(on_wait),
        reraise=True,
    )
    return guard if sleep is None else guard.copy(sleep=sleep)


def redis_guard_sync(
    *,
    max_attempts: int | None = None,
    initial: float = GUARD_INITIAL_S,
    maximum: float = GUARD_MAX_S,
    errors: tuple[type[Exception], ...] = OUTAGES,
    on_wait: OnWait | None = None,
    rng: Rng | None = None,
    end: EndSignal | None = None,
) -> Retrying:
    """`redis_guard` for threads: `redis_guard_sync()(store.renew, ...)`. Once `end` is set the last error is raised."""
    last = stop_never if max_attempts is None else stop_after_attempt(max_attempts)
    guard = Retrying(
        stop=last if end is None else lambda state: end.is_set() or last(state),
        wait=FullJitter(initial, maximum, random.Random() if rng is None else rng),
        retry=retry_if_exception_type(errors),
        before_sleep=None if on_wait is None else _telling(on_wait),
        reraise=True,
    )
    return guard if end is None else guard.copy(sleep=end.wait)


def _telling(on_wait: OnWait) -> Callable[[RetryCallState], None]:
    def before_sleep(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if error is not None:
            on_wait(state.attempt_number, state.upcoming_sleep, error)

    return before_sleep
