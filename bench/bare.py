"""The limit: the same requests with no queue, over headrace's own transport: `python -m bench.bare --url U`.

The garbage collector looks as seldom as in a worker: over aiohttp, which makes cycles, the limit would else be too low.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

from bench.job import PATH, encode, payload
from workers.process import spare_the_collector
from workers.transport import Call, TransportName, make_transport


def _calls(options: argparse.Namespace) -> list[Call]:
    return [
        Call(
            "POST", options.url + PATH,
            (("content-type", "application/json"), ("idempotency-key", f"{number:032x}"), ("x-task-attempt", "1")),
            encode(payload(number)),
        )
        for number in range(options.count)
    ]  # fmt: skip


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds in all, requests/s after the first `skip`, CPU microseconds a request, seconds that each took."""
    transport = make_transport(cast(TransportName, options.transport), slots=options.in_flight)
    calls = iter(_calls(options))
    took: list[float] = []
    ended: list[float] = []

    async def lane(calls: Iterator[Call]) -> None:
        for call in calls:
            start = time.perf_counter()
            answer = await transport.send(call)
            ended.append(time.perf_counter())
            took.append(ended[-1] - start)
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}")

    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(lane(calls) for _ in range(options.in_flight)))
    cpu = time.process_time() - cpu
    await transport.aclose()
    first = options.skip or max(1, len(took) // 10)  # those connect
    warm = sorted(took[first:])
    return {
        "seconds": ended[-1] - start,
        "rate": (len(ended) - first) / (ended[-1] - ended[first - 1]),
        "cpu_us": cpu / options.count * 1e6,
        "p50": warm[len(warm) // 2],
        "p99": warm[int(len(warm) * 0.99)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bare")
    parser.add_argument("--url", required=True)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--skip", type=int, default=0, help="requests at the start that do not count (a tenth)")
    parser.add_argument("--transport", default="auto")
    options = parser.parse_args()
    spare_the_collector()
    try:
        import uvloop
    except ImportError:
        answer = asyncio.run(measure(options))
    else:
        answer = uvloop.run(measure(options))
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
