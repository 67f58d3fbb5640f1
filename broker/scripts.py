"""The scripts of `lua/`, one typed wrapper each. A wrapper does no I/O: it returns a Command, which a store runs.

All scheduling state lives in Redis and changes only inside these scripts, by the server's clock. Durations here are
seconds (float); Redis and Lua hold whole milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from broker.adminscripts import SCRUB_START as SCRUB_START
from broker.adminscripts import AdminScripts
from broker.adminscripts import EndpointRow as EndpointRow
from broker.adminscripts import Registered as Registered
from broker.adminscripts import Restored as Restored
from broker.adminscripts import Scrubbed as Scrubbed
from broker.script import VERBS as VERBS
from broker.script import Command as Command
from broker.script import Script as Script
from broker.script import as_text, as_words, in_ms
from broker.script import load as load

Settled = Literal["done", "already", "lost", "canceled"]
Verdict = Literal["good", "count", "open", "ignore"]

BATCH = 100  # most tasks in one call of a verb that settles
ENQUEUE_BATCH = 500  # most tasks in one round trip of enqueue
ENQUEUE_PART = 100  # tasks in one call of it, where more go out together


class Words(list[Any]):
    """A word a task, and `events` of breakers: "opened <endpoint> <cooldown ms> <reason>", "closed <endpoint>"."""

    events: tuple[str, ...] = ()


def _settled(count: int) -> Callable[[Any], Words]:
    def parse(reply: Any) -> Words:
        words = Words(as_words(reply[:count]))
        words.events = tuple(as_words(reply[count:]))
        return words

    return parse


class NewTask(NamedTuple):
    """What enqueue needs to know. Seconds; 0 means none. `data` is the encoded work (see `rqjob`); `digest` may be ""
    where the id was made for it alone."""

    id: str
    data: bytes
    digest: str
    description: str
    priority: str = "normal"
    requires: tuple[str, ...] = ()
    delay: float = 0.0
    deadline: float = 0.0
    max_attempts: int = 0
    reply: str = ""
    idempotency_key: str = ""


USUAL: Final = NewTask("", b"", "", "")[4:]  # its options


def _options(task: NewTask) -> str:
    words = (
        task.priority, ",".join(task.requires), in_ms(task.delay), in_ms(task.deadline), task.max_attempts,
        task.reply, task.idempotency_key,
    )  # fmt: skip
    return "|".join(map(str, words))


class Enqueued(NamedTuple):
    """`word`: queued, already, full, conflict or after (a part before it was not done); `id`: the task's, the earlier
    one's for already and conflict."""

    word: str
    id: str


class Offer(NamedTuple):
    """What a process offers to run on one endpoint: `room` more, beside the `held` it runs now."""

    endpoint: str
    room: int
    held: int


class Lease(NamedTuple):
    """The time-limited right to run one task on one endpoint. `token` fences every settle."""

    id: str
    token: str
    endpoint: str


class Claimed(NamedTuple):
    """A task and its lease. Times are Unix seconds by the server's clock; `deadline` is 0.0 for none.

    `attempts` counted so far; `max_attempts` 0 means the pool's; `plain`: a plain RQ producer enqueued it;
    `lost`: leases that ended without a settle.
    """

    lease: Lease
    attempts: int
    max_attempts: int
    deadline: float
    enqueued_at: float
    claimed_at: float
    data: bytes
    plain: bool
    lost: int


class Claims(NamedTuple):
    """`wake`: claim again within so many seconds even if no doorbell rings (None: no need); `left`: still waiting;
    `stale`: endpoints to check before they are given anything."""

    wake: float | None
    left: int
    tasks: list[Claimed]
    stale: tuple[str, ...] = ()


class Finish(NamedTuple):
    """Outcome ok. `answer` is one line of JSON; `return_value` is for a plain RQ producer, else ""."""

    lease: Lease
    answer: str
    body: bytes
    return_value: str = ""


@dataclass(frozen=True, slots=True)
class Retry:
    """A failed attempt, tried again after `delay` seconds, elsewhere if `exclude`; the endpoint rests for `pause`."""

    lease: Lease
    delay: float
    verdict: Verdict
    reason: str
    history: str
    exclude: bool = True
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Release:
    """Not run to an end and not counted; `pause` seconds of rest for the endpoint."""

    lease: Lease
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Given up. A reason that starts with "expired" makes the outcome `expired`."""

    lease: Lease
    verdict: Verdict
    reason: str
    answer: str
    body: bytes
    history: str
    exc_string: str = ""


def _whole(item: Finish | DeadLetter) -> bytes:
    """The field `x_ans`."""
    return b"%s\n%s" % (item.answer.encode(), item.body)


@dataclass(frozen=True, slots=True)
class Reaped:
    requeued: int
    poisoned: int
    freed: int


def _claims(reply: Any) -> Claims:
    wake, left, values, stale, now = reply
    claimed_at = int(now) / 1000
    tasks: list[Claimed] = []
    for at in range(0, len(values), 3):
        words = values[at + 2].decode().split(" ", 7)
        endpoint, attempts, most, deadline, born, plain, lost, token = words
        lease = Lease(values[at].decode(), token, endpoint)
        tasks.append(
            Claimed(
                lease, int(attempts), int(most), int(deadline) / 1000, int(born) / 1000, claimed_at, values[at + 1],
                plain == "1", int(lost),
            )
        )  # fmt: skip
    return Claims(None if wake < 0 else wake / 1000, int(left), tasks, tuple(as_words(stale)))


class Scripts(AdminScripts):
    """Every verb: here those of a task's life and of the processes that run it."""

    def enqueue(
        self, pool: str, tasks: Sequence[NewTask], max_depth: int = 0, part: tuple[str, int] | None = None
    ) -> Command[list[Enqueued]]:
        """At most ENQUEUE_BATCH tasks. max_depth 0 takes the pool's. `part`: an id that the parts of one call have in
        common, and the number of this one, from 0: it does nothing unless the one before it was done."""
        args: list[str | bytes | int] = [max_depth, len(tasks)]
        for task in tasks:
            options = "" if task[4:] == USUAL else _options(task)
            args += (task.id, task.data, task.digest, task.description, options)
        if part is not None:
            args += part

        def parse(reply: Any) -> list[Enqueued]:
            # as Enqueued("queued", ...), in two thirds of its time
            answers = [tuple.__new__(Enqueued, ("queued", task.id)) for task in tasks]
            for i in range(0, len(reply), 3):
                answers[reply[i] - 1] = Enqueued(as_text(reply[i + 1]), as_text(reply[i + 2]))
            return answers

        return self._command("enqueue", pool, args, parse)

    def claim(
        self,
        pool: str,
        process: str,
        offers: Sequence[Offer],
        *,
        lease: float,
        most: int,
        known: Sequence[Lease] | None = None,
    ) -> Command[Claims]:
        """`known`: all leases the process knows of, after a claim whose reply was lost; the others are given again."""
        args: list[str | bytes | int] = [process, in_ms(lease), most, len(offers)]
        for offer in offers:
            args += (offer.endpoint, offer.room, offer.held)
        if known is not None:
            args.append(len(known))
            for held in known:
                args += (held.id, held.token)
        return self._command("claim", pool, args, _claims)

    def renew(
        self, pool: str, process: str, endpoints: Sequence[str], leases: Sequence[Lease], *, lease: float
    ) -> Command[list[str]]:
        """A word a lease: held, lost, canceled or already."""
        args: list[str | bytes | int] = [process, in_ms(lease), len(endpoints), *endpoints, len(leases)]
        for held in leases:
            args += (held.id, held.token, held.endpoint)
        return self._command("renew", pool, args, as_words)

    def finish(self, pool: str, items: Sequence[Finish], *, result_ttl: float) -> Command[list[Settled]]:
        args: list[str | bytes | int] = [in_ms(result_ttl), len(items)]
        for item in items:
            args += (item.lease.id, item.lease.token, item.lease.endpoint, _whole(item), item.return_value)
        return self._command("finish", pool, args, _settled(len(items)))

    def retry(self, pool: str, items: Sequence[Retry]) -> Command[list[Settled]]:
        args: list[str | bytes | int] = [len(items)]
        for item in items:
            args += (
                item.lease.id, item.lease.token, item.lease.endpoint, in_ms(item.delay), item.verdict, item.reason,
                item.history, int(item.exclude), in_ms(item.pause),
            )  # fmt: skip
        return self._command("retry", pool, args, _settled(len(items)))

    def release(self, pool: str, items: Sequence[Release]) -> Command[list[Settled]]:
        args: list[str | bytes | int] = [len(items)]
        for item in items:
            args += (item.lease.id, item.lease.token, item.lease.endpoint, in_ms(item.pause))
        return self._command("release", pool, args, as_words)

    def dead_letter(
        self, pool: str, items: Sequence[DeadLetter], *, dead_letter_ttl: float, result_ttl: float
    ) -> Command[list[Settled]]:
        args: list[str | bytes | int] = [in_ms(dead_letter_ttl), in_ms(result_ttl), len(items)]
        for item in items:
            args += (
                item.lease.id, item.lease.token, item.lease.endpoint, item.verdict, item.reason, _whole(item),
                item.history, item.exc_string,
            )  # fmt: skip
        return self._command("dead_letter", pool, args, _settled(len(items)))

    def promote(self, pool: str) -> Command[int]:
        return self._command("promote", pool, [], int)

    def reap(self, pool: str, *, max_deliveries: int, dead_letter_ttl: float, lease: float) -> Command[Reaped]:
        """Nothing for one lease after an outage: who lives is to renew first."""
        args = [max_deliveries, in_ms(dead_letter_ttl), in_ms(lease)]
        return self._command("reap", pool, args, lambda reply: Reaped(*map(int, reply)))

    def expire(self, pool: str, *, result_ttl: float) -> Command[int]:
        return self._command("expire", pool, [in_ms(result_ttl)], int)

    def cancel(self, pool: str, ids: Sequence[str], *, result_ttl: float) -> Command[list[str]]:
        """A word a task: canceled, running (canceled; its attempt is told), settled, stock (RQ runs it) or unknown."""
        return self._command("cancel", pool, [in_ms(result_ttl), len(ids), *ids], as_words)

    def watch(self, pool: str, reply: str, ids: Sequence[str]) -> Command[list[str]]:
        """A word a task: settled, watching (its id will come to the reply list) or unknown."""
        return self._command("watch", pool, [reply, len(ids), *ids], as_words)

    def leave(self, pool: str, process: str) -> Command[int]:
        return self._command("leave", pool, [process], int)

    def health(self, pool: str, endpoint: str, ok: bool, detail: str) -> Command[str]:
        """A check's result: "recovered", "failed" (just now), "down" (at its first check), "same" or "unknown"."""
        return self._command("health", pool, [endpoint, int(ok), detail], as_text)

    def ticket(self, pool: str, duty: str, process: str, *, seconds: float, again: bool = False) -> Command[bool]:
        """Whether the process does the duty for so long. `again`: the holder of the ticket gets it once more."""
        return self._command("ticket", pool, [duty, process, in_ms(seconds), int(again)], bool)
