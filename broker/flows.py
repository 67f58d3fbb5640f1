"""A flow says what to do with Redis, once for sync and async: a generator that yields steps and is sent their replies.

A driver performs the steps: here the plain ones, over a Store or an AsyncStore; `client` and `asyncclient` add waiting
and repeated tries. Every step of every flow may be repeated after a lost reply.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from broker.errors import BrokerError
from broker.scripts import BATCH, Command

if TYPE_CHECKING:
    from broker.store import AsyncStore, Store

T = TypeVar("T")
Reply = Any


@dataclass(frozen=True, slots=True)
class Call:
    """Scripts, in one round trip. Replies: what each returns."""

    commands: Sequence[Command[Any]]


@dataclass(frozen=True, slots=True)
class Stream:
    """Scripts, in one round trip, each on its way while the next is made (see `Made`). Replies: what each returns; a
    BrokerError in the place of one that failed."""

    commands: Sequence[Command[Any]]


@dataclass(frozen=True, slots=True)
class Plain:
    """Plain commands, in one round trip. Replies in order."""

    commands: Sequence[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Pop:
    """Takes up to `most` ids from a reply list, waiting up to `seconds` for the first. Reply: list of str."""

    key: str
    most: int
    seconds: float

    @property
    def command(self) -> tuple[Any, ...]:
        rest = (1, self.key, "LEFT", "COUNT", self.most)
        return ("BLMPOP", max(self.seconds, 0.001), *rest) if self.seconds > 0 else ("LMPOP", *rest)


@dataclass(frozen=True, slots=True)
class Await:
    """Waits up to `seconds` for the outcome that the driver's mailbox expects."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Pull:
    """Takes up to `most` works from the caller's iterable. Reply: (list of works, whether it is at its end)."""

    most: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Calls the caller's function, and under asyncio awaits what can be awaited. Reply: its value."""

    function: Callable[[Any], Any]
    argument: Any


Step = Call | Stream | Plain | Pop | Await | Sleep | Pull | Ask
Flow = Generator[Step, Reply, T]


def popped(reply: Any) -> list[str]:
    """The ids in what LMPOP or BLMPOP gave."""
    return [item.decode() for item in reply[1]] if reply else []


def run_step(store: Store, step: Step) -> Reply:
    if isinstance(step, Call):
        return store.run_many(step.commands)
    if isinstance(step, Stream):
        return store.stream(step.commands)
    if isinstance(step, Plain):
        return store.pipelined(step.commands)
    if isinstance(step, Pop):
        return popped(store.blocking(*step.command))
    raise TypeError(f"{step!r}: this driver does not wait")


async def run_step_async(store: AsyncStore, step: Step) -> Reply:
    if isinstance(step, Call):
        return await store.run_many(step.commands)
    if isinstance(step, Stream):
        return await store.stream(step.commands)
    if isinstance(step, Plain):
        return await store.pipelined(step.commands)
    if isinstance(step, Pop):
        return popped(await store.blocking(*step.command))
    raise TypeError(f"{step!r}: this driver does not wait")


def run(flow: Flow[T], perform: Callable[[Step], Reply]) -> T:
    """Runs a flow to its end. A step that fails with a BrokerError fails in the flow."""
    reply: Reply = None
    error: BrokerError | None = None
    while True:
        try:
            step = flow.send(reply) if error is None else flow.throw(error)
        except StopIteration as end:
            value: T = end.value
            return value
        reply, error = None, None
        try:
            reply = perform(step)
        except BrokerError as failed:
            error = failed


def drive(store: Store, flow: Flow[T]) -> T:
    """Runs a flow that only reads and writes; one try for each step."""
    return run(flow, lambda step: run_step(store, step))


class Made(Sequence[T]):
    """`count` items, each made when it is first asked for, by its number, and kept."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count, self._make = count, make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...
    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self._count))]
        if not 0 <= at < self._count:
            raise IndexError(at)
        if at not in self._made:
            self._made[at] = self._make(at)
        return self._made[at]


def in_batches(items: Sequence[T], size: int = BATCH) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]
