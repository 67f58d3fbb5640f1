"""The worker attached to one endpoint: turns a claimed task into a request, and what comes back into a settlement."""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from broker.configmodel import Endpoint, Pool
from broker.errors import InvalidTask
from broker.outcome import encode_answer
from broker.rqjob import decode_data, plain_result, rq_exc_string, rq_return_value
from broker.scripts import Claimed, DeadLetter, Finish, Release, Retry
from broker.task import MOST_ATTEMPTS, Work
from workers import retry
from workers.adapters import Adapter, make_adapter
from workers.echoes import Echoes
from workers.errors import DEFAULT_PAUSE_S, AttemptFailed
from workers.transport.types import Answer, Call, Transport

Settlement = Finish | Retry | Release | DeadLetter

RESULT_SHARE: Final = 0.7  # of the result limit that the kept body of a failed answer may have
MIN_ATTEMPT_S: Final = 0.001
BREATH_S: Final = 0.05  # after a 429 without Retry-After, of an endpoint whose slots adapt, and which answers others

log = logging.getLogger("headrace.worker")


class Worker:
    """Runs attempts on one endpoint. Keeps no scheduling state: `run` never raises, it returns a settlement."""

    def __init__(
        self,
        endpoint: Endpoint,
        pool: Pool,
        transport: Transport,
        *,
        rng: random.Random | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.endpoint = endpoint
        self.pool = pool
        self.transport = transport
        self.adapter: Adapter = make_adapter(endpoint, pool, clock=wall)
        self._echoes = Echoes(endpoint)
        self._rng = rng or random.Random()
        self._wall = wall
        self._answered = -math.inf  # when it last answered well here, by the monotonic clock

    async def run(self, claimed: Claimed) -> Settlement:
        """One attempt, from claimed task to settlement. Canceled, it raises CancelledError: the caller releases."""
        begun = time.monotonic()
        try:
            work, serializer = decode_data(claimed.data, self.pool.queue.payload_limit)
            return self._finish(claimed, await self._attempt(work, claimed), serializer)
        except InvalidTask as error:
            failure = AttemptFailed("task_error", str(error))
            return self._give_up(claimed, failure, str(error), _server_time(claimed, begun))
        except AttemptFailed as failure:
            return self._failed(claimed, failure, _server_time(claimed, begun))
        except Exception as error:  # a fault of ours must cost this task an attempt, not the process its life
            log.exception("task %s: attempt failed inside headrace", claimed.lease.id)
            inside = AttemptFailed("app_error", f"inside headrace: {type(error).__name__}: {error}")
            return self._failed(claimed, inside, _server_time(claimed, begun))

    def limit(self, claimed: Claimed) -> float:
        """The longest this attempt can take, in seconds."""
        attempt = self.pool.timeout.attempt
        if claimed.deadline:
            attempt = min(attempt, claimed.deadline - claimed.claimed_at)
        return max(attempt, MIN_ATTEMPT_S)

    async def _attempt(self, work: Work, claimed: Claimed) -> Answer:
        call = self.adapter.call(work, claimed.lease.id, claimed.attempts + 1)
        limit = self.limit(claimed)
        by_deadline = limit < call.timeouts.attempt
        if by_deadline:
            call = _limited(call, limit)
        try:
            answer = await self.transport.send(call)
            self.adapter.check_answer(work, answer)
            return self._echoes.answer(answer)
        except AttemptFailed as failure:
            if by_deadline and failure.kind in ("attempt_timeout", "first_byte_timeout"):
                raise AttemptFailed("own_timeout", "the task's deadline passed during the attempt") from None
            raise self._echoes.failure(self.adapter.blame(work, failure)) from None

    def _finish(self, claimed: Claimed, answer: Answer, serializer: str) -> Finish:
        self._answered = time.monotonic()
        value = ""
        if claimed.plain:
            result = plain_result(
                answer.status, answer.headers, answer.body, self.endpoint.id, claimed.attempts + 1
            )
            value = rq_return_value("pickle" if serializer == "pickle" else "json", result)
        told = encode_answer(answer.status, answer.headers, self.endpoint.id)
        return Finish(claimed.lease, told, answer.body, value)

    def _failed(self, claimed: Claimed, failure: AttemptFailed, now: float) -> Settlement:
        attempt = claimed.attempts + 1
        left = claimed.deadline - now if claimed.deadline else None
        asked = claimed.max_attempts if claimed.max_attempts > 0 else self.pool.retry.max_attempts
        most = min(asked, MOST_ATTEMPTS)  # whoever wrote the hash
        decision = retry.decide(self.pool.retry, failure, attempt, most, left, self._rng)
        if isinstance(decision, retry.Release):
            pause = decision.pause_s
            if failure.retry_after is None and self.endpoint.max_concurrent == "auto" and self._serves():
                pause = BREATH_S  # it is given fewer slots instead
            log.debug("task %s: %s asks for %.2f s of rest", claimed.lease.id, self.endpoint.id, pause)
            return Release(claimed.lease, pause)
        if isinstance(decision, retry.DeadLetter):
            return self._give_up(claimed, failure, decision.reason, now)
        level = logging.INFO if attempt == 1 else logging.DEBUG
        log.log(level, "task %s: attempt %d on %s: %s", claimed.lease.id, attempt, self.endpoint.id, failure)
        history = self._history(claimed, failure, now, round(decision.delay_s, 3))
        verdict, pause = failure.rule.breaker, decision.pause_s
        return Retry(claimed.lease, decision.delay_s, verdict, str(failure), history, pause=pause)

    def _serves(self) -> bool:
        return time.monotonic() - self._answered < DEFAULT_PAUSE_S

    def _give_up(self, claimed: Claimed, failure: AttemptFailed, reason: str, now: float) -> DeadLetter:
        log.error("task %s: given up on %s: %s", claimed.lease.id, self.endpoint.id, reason)
        body = failure.body[: int(self.pool.queue.result_limit * RESULT_SHARE)]
        return DeadLetter(
            claimed.lease,
            failure.rule.breaker,
            reason,
            encode_answer(failure.status, failure.headers, self.endpoint.id),
            body,
            self._history(claimed, failure, now),
            rq_exc_string(reason) if claimed.plain else "",
        )

    def _history(self, claimed: Claimed, failure: AttemptFailed, now: float, retry_in: float | None = None) -> str:
        """One line of JSON: what became of this attempt. Times in Unix seconds; `retry_in` seconds, None for never."""
        return json.dumps(
            {
                "attempt": claimed.attempts + 1,
                "endpoint": self.endpoint.id,
                "kind": failure.kind,
                "status": failure.status,
                "error": failure.detail,
                "started": round(claimed.claimed_at, 3),
                "ended": round(now, 3),
                "retry_in": retry_in,
            },
            separators=(",", ":"),
        )


def _server_time(claimed: Claimed, begun: float) -> float:
    """As far as can be told without asking it. `begun` by the monotonic clock, just after the claim."""
    return claimed.claimed_at + time.monotonic() - begun


def _limited(call: Call, limit: float) -> Call:
    return call._replace(timeouts=replace(call.timeouts, attempt=limit))
