"""An event loop that stood still: what the endpoint answered meanwhile counts, and the lag is told."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest

from broker import Broker, Request, admin
from tests.chaos.held import VARIABLE
from tests.support.endpoints import SimulatedEndpoint
from tests.support.fleet import fleet, pool_config, until
from tests.support.transports import LOOPS, every, every_loop
from workers.lag import TOO_LATE_S, LoopLag
from workers.transport import Call, Timeouts, TransportName, make_transport

LIMITS = Timeouts(connect=2.0, first_byte=2.0, idle=2.0, attempt=2.5)
HOLD_S = 3.5
CHAT = Request("POST", "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "hi"}]})
BODY = json.dumps(CHAT.json).encode()


@every_loop
@every
def test_limits_that_pass_while_the_loop_stands_still_do_not_blame_the_endpoint(name: TransportName, loop: str) -> None:
    async def main(endpoint: SimulatedEndpoint) -> int:
        transport = make_transport(name, slots=1)
        try:
            call = Call("POST", f"{endpoint.url}/v1/chat/completions", body=BODY, timeouts=LIMITS)
            answer = asyncio.create_task(transport.send(call))
            await asyncio.to_thread(until, lambda: endpoint.stats()["in_flight"] == 1, "it has come")
            asyncio.get_running_loop().call_soon(time.sleep, HOLD_S)
            return (await answer).status
        finally:
            await transport.aclose()

    with SimulatedEndpoint("--latency", "1s") as endpoint, asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        assert runner.run(main(endpoint)) == 200


@every_loop
def test_nor_those_that_pass_while_it_connects(loop: str) -> None:
    async def main(url: str) -> int:
        transport = make_transport("httptools", slots=1)
        try:
            answer = asyncio.create_task(transport.send(Call("GET", f"{url}/health", timeouts=LIMITS)))
            asyncio.get_running_loop().call_soon(time.sleep, HOLD_S)
            return (await answer).status
        finally:
            await transport.aclose()

    with SimulatedEndpoint() as endpoint, asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        assert runner.run(main(endpoint.url)) == 200


@every_loop
def test_the_lag_is_seen_while_the_loop_is_blocked_and_afterwards(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    lag = LoopLag()

    async def main() -> tuple[float, float]:
        lag.start(asyncio.get_running_loop())
        meanwhile = asyncio.create_task(asyncio.to_thread(_while_blocked))
        asyncio.get_running_loop().call_later(0.0, time.sleep, TOO_LATE_S + 1.0)
        return await meanwhile, lag.worst()

    def _while_blocked() -> float:
        return float(until(lambda: lag.worst() >= TOO_LATE_S and lag.worst(), "the lag shows"))

    with caplog.at_level(logging.WARNING), asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        during, after = runner.run(main())
    assert TOO_LATE_S <= during <= after + 0.01
    assert sum("is blocked" in record.message for record in caplog.records) == 1


def test_a_blocked_process_keeps_its_tasks_and_status_tells(tmp_path: Path, redis_url: str) -> None:
    lease = 2.0
    with SimulatedEndpoint("--latency", "1s") as endpoint, Broker(redis_url) as broker:
        pool = {"llm": pool_config([endpoint.url], slots=8, queue={"lease": f"{lease}s"}, retry={"max_attempts": 1})}
        pool["llm"]["timeout"] = {"first_byte": "2s", "attempt": "3s"}
        held = {VARIABLE: str(lease * 2)}
        with fleet(tmp_path, redis_url, pool, 1, module="tests.chaos.held", env=held) as running:
            tasks = broker.enqueue_many("llm", [CHAT] * 8)
            until(lambda: endpoint.stats()["in_flight"] == 8, "all of it is under way")
            os.kill(running.pids[0], signal.SIGUSR1)
            until(lambda: max(admin.status(running.store, "llm").lag.values(), default=0) > lease, "the status tells")
            results = [task.result(timeout=60) for task in tasks]
            assert [(result.outcome, result.attempts) for result in results] == [("ok", 1)] * 8
            assert set(endpoint.stats()["by_task"].values()) == {1}
