"""`python -m workers.simulate`: prints one JSON line with its port when ready, then serves until it is told to end."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields

from workers.simulate.behaviour import HEALTH, MODES, Behaviour
from workers.simulate.server import simulated


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    names = {field.name for field in fields(Behaviour)}
    settings = {name: value for name, value in vars(options).items() if name in names and value is not None}
    try:
        behaviour = Behaviour().changed(settings)
    except ValueError as problem:
        print(f"simulate: {problem}", file=sys.stderr)
        return 2
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(behaviour, options))
    except OSError as problem:
        print(f"simulate: {options.host}:{options.port}: {problem.strerror or problem}", file=sys.stderr)
        return 1
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _serve(behaviour: Behaviour, options: argparse.Namespace) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    if options.until_eof:
        threading.Thread(target=_await_eof, args=(lambda: loop.call_soon_threadsafe(told.set),), daemon=True).start()
    place = {"host": options.host, "port": options.port, "seed": options.seed, "record": options.record}
    async with simulated(behaviour, **place) as (port, _):
        print(json.dumps({"port": port, "url": f"http://{options.host}:{port}", "pid": os.getpid()}), flush=True)
        await told.wait()


def _await_eof(tell: Callable[[], object]) -> None:
    while os.read(0, 4096):
        pass
    tell()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.simulate", description="A simulated inference endpoint.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--latency", metavar="TIME", help="before every answer, such as 200ms")
    add("--jitter", metavar="TIME", help="the latency varies by this much up and down")
    add("--slots", metavar="N", help="requests at a time; over it 429")
    add("--knee", metavar="N", help="above so many at a time the latency grows in proportion")
    add("--mode", choices=MODES, help="how it fails")
    add("--status", metavar="CODE", help="the status of failures (default: 503)")
    add("--retry-after", metavar="TIME", help="sent with every error")
    add("--fail-first", metavar="N", help="only the first N requests fail")
    add("--fail-for", metavar="TIME", help="it fails only so long")
    add("--fail-rate", metavar="SHARE", help="the share of requests that fail, 0 to 1")
    add("--health", choices=HEALTH, help="what GET /health does")
    add("--drip-interval", metavar="TIME", help="between two bytes in mode drip")
    add("--huge-bytes", metavar="N", help="the body in mode huge")
    add("--max-prompt", metavar="N", help="characters; longer prompts are answered 400")
    add("--api-key", metavar="KEY", help="the bearer key it wants")
    add("--seed", type=int, help="makes jitter and failures repeatable")
    add("--record", metavar="FILE", help="append a JSON line for every request of work")
    add("--until-eof", action="store_true", help="end at the end of standard input: with whoever holds its other end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
