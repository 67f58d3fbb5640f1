"""`headrace status --watch`: the picture of all pools, drawn again each second; with --json a line of it each time."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from broker.cli import screen
from broker.errors import BrokerUnavailable
from broker.inspect import EndpointStatus, PoolStatus
from broker.logs import escape

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

EVERY_S: Final = 1.0
LATE_S: Final = 1.0  # an event loop that is late by less is only busy
COLOURS: Final = {
    "ready": "green", "full": "green", "probing": "yellow", "paused": "yellow", "draining": "yellow", "absent": "red",
    "unhealthy": "red", "open": "red", "disabled": "dim", "removed": "dim",
}  # fmt: skip

Read = Callable[[], Sequence[PoolStatus]]
Served = Mapping[tuple[str, str], int]


def watch(args: argparse.Namespace, shown: str, read: Read, plain: Callable[[Sequence[PoolStatus]], None]) -> int:
    """Until it is interrupted. `plain` prints one picture where there is no terminal. Redis may go and come back."""
    try:
        if args.json or not sys.stdout.isatty():
            _print_again(args, shown, read, plain)
        else:
            _draw(shown, read)
    except KeyboardInterrupt:
        return 0
    return 0


def _print_again(
    args: argparse.Namespace, shown: str, read: Read, plain: Callable[[Sequence[PoolStatus]], None]
) -> None:
    while True:
        found = read()
        if args.json:
            sys.stdout.write(json.dumps({"redis": shown, "pools": [each.to_dict() for each in found]}) + "\n")
        else:
            plain(found)
        sys.stdout.flush()
        time.sleep(EVERY_S)


def _draw(shown: str, read: Read) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    earlier: Served = {}
    looked = time.monotonic()
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                found = read()
                now = time.monotonic()
                live.update(picture(shown, found, rates(found, earlier, now - looked)), refresh=True)
                earlier, looked = served(found), now
            except BrokerUnavailable as error:
                live.update(Text(escape(str(error)), style="red"), refresh=True)
            time.sleep(EVERY_S)


def served(pools: Sequence[PoolStatus]) -> Served:
    return {(pool.pool, each.id): each.served for pool in pools for each in pool.endpoints}


def rates(pools: Sequence[PoolStatus], earlier: Served, seconds: float) -> dict[tuple[str, str], float]:
    """Requests a second that each endpoint has served since `earlier`; nothing for one that is new."""
    known = {name: number for name, number in served(pools).items() if name in earlier and seconds > 0}
    return {name: max(0, number - earlier[name]) / seconds for name, number in known.items()}


def picture(shown: str, pools: Sequence[PoolStatus], rate: Mapping[tuple[str, str], float]) -> Group:
    """What is drawn: a line and a table for each pool."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(f"Redis: {escape(shown)}    {time.strftime('%H:%M:%S')}    Ctrl-C ends", style="dim")]
    if not pools:
        parts.append(Text("no pools: no worker has registered one yet"))
    for pool in pools:
        parts += [Text(""), Text(headline(pool), style="bold"), _table(pool, rate)]
        parts += [Text(line, style="yellow") for line in late(pool)]
    return Group(*parts)


def headline(pool: PoolStatus) -> str:
    """One line: the pool in numbers."""
    oldest = f", the oldest for {screen.span(pool.oldest)}" if pool.oldest is not None else ""
    special = ", ".join(f"{count} {name}" for name, count in pool.waiting.items() if count and name != "normal")
    return (
        f"pool {pool.pool}: {pool.backlog} waiting{f' ({special})' if special else ''}{oldest}; "
        f"{pool.delayed} delayed, {pool.running} running, {screen.counted(pool.dead, 'dead letter')}; "
        f"{screen.counted(len(pool.processes), 'process', 'processes') if pool.processes else 'no process serves it'}"
    )


def late(pool: PoolStatus) -> list[str]:
    """A line for each process whose event loop was held up: its attempts stood still, though its leases lived."""
    return [
        f"process {escape(name)}: its event loop was late by up to {screen.span(seconds)} in the last minute"
        for name, seconds in pool.lag.items()
        if seconds >= LATE_S
    ]


def _table(pool: PoolStatus, rate: Mapping[tuple[str, str], float]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in ("endpoint", "state", "slots"):
        table.add_column(header)
    for header in ("per second", "served", "failed"):
        table.add_column(header, justify="right")
    table.add_column("why", overflow="fold")
    for each in pool.endpoints:
        speed = rate.get((pool.pool, each.id))
        table.add_row(
            escape(each.id), Text(each.state, style=COLOURS.get(each.state, "")), Text(bar(each)),
            "-" if speed is None else f"{speed:.1f}", str(each.served), str(each.failed), Text(escape(why(each))),
        )  # fmt: skip
    return table


def bar(each: EndpointStatus, width: int = 10) -> str:
    """Slots in use, as a bar and as numbers."""
    full = min(width, round(width * each.in_flight / max(1, each.slots)))
    return f"{'█' * full}{'░' * (width - full)} {each.in_flight}/{each.slots}"


def why(each: EndpointStatus) -> str:
    """What there is to say of its state."""
    if each.state == "unhealthy":
        return each.health_detail
    if each.reason:
        return each.reason
    return f"recovering: {each.slots} of {each.max_concurrent} slots" if each.slots < each.max_concurrent else ""
