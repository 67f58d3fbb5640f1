"""The functions that RQ jobs name: what a stock `rq worker -S json POOL` runs.

headrace's own workers never call them; they read the job and send its request themselves, over all endpoints of the
pool. Here it is one blocking request to the endpoint in HEADRACE_ENDPOINT (with HEADRACE_ENDPOINT_API_KEY, if set): no
other endpoint, no retry, no breaker, no limit over several workers.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from broker.config import Endpoint, Pool, load_config
from broker.errors import ConfigError, Problem
from broker.rqjob import plain_result
from broker.task import NpuTask, Request, Work, new_task_id
from workers.adapters import NpuAdapter
from workers.echoes import Echoes
from workers.errors import AttemptFailed
from workers.transport import make_transport
from workers.transport.types import Answer, Call

_ENVIRONMENT: Final = ("HEADRACE_ENDPOINT", "HEADRACE_ENDPOINT_API_KEY", "HEADRACE_ENDPOINT_API_KEY_FILE")


def request(
    method: str,
    path: str,
    json: Any = None,
    body: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Sends one HTTP request. Arguments as in broker.Request; `timeout` in seconds for the whole attempt.

    Returns `{"status_code", "headers", "json" or "body", "endpoint", "attempts"}`. Raises InvalidTask for wrong
    arguments, ConfigError without an endpoint, AttemptFailed for every answer but a success.
    """
    return _run(Request(method, path, json, body, headers or {}, timeout))


def npu(task_type: str, data: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
    """Runs one NPU task. Arguments as in broker.NpuTask; returns and raises as `request` does."""
    return _run(NpuTask(task_type, data, timeout))


def _run(work: Work) -> dict[str, Any]:
    pool, endpoint = _only_endpoint(os.environ)
    adapter, echoes = NpuAdapter(endpoint, pool), Echoes(endpoint)  # this one takes both kinds of work
    call = adapter.call(work, _job_id(), 1)
    try:
        answer = asyncio.run(_send(call, pool))
        adapter.check_answer(work, answer)
    except AttemptFailed as failure:
        raise echoes.failure(adapter.blame(work, failure)) from None
    answer = echoes.answer(answer)
    return plain_result(answer.status, answer.headers, answer.body, endpoint.id, 1)


async def _send(call: Call, pool: Pool) -> Answer:
    transport = make_transport(pool.connection.transport, slots=1)
    try:
        return await transport.send(call)
    finally:
        await transport.aclose()


def _only_endpoint(environ: Mapping[str, str]) -> tuple[Pool, Endpoint]:
    """The pool made of HEADRACE_ENDPOINT alone, with default limits. Raises ConfigError unless it is one URL."""
    config = load_config(None, {name: environ[name] for name in _ENVIRONMENT if environ.get(name)})
    found = [(pool, endpoint) for pool in config.pools.values() for endpoint in pool.endpoints]
    if len(found) != 1:
        have = f"has {len(found)} URLs" if found else "is not set"
        text = f"{have}; a stock rq worker serves one endpoint: set it to that URL, or start `headrace worker` instead"
        raise ConfigError([Problem("environment", None, "HEADRACE_ENDPOINT", text)])
    return found[0]


def _job_id() -> str:
    """The running RQ job's id, so that an endpoint sees the same idempotency key whoever runs the task."""
    rq = sys.modules.get("rq")  # loaded by whoever runs this as a job; not a dependency of a plain call
    job = rq.get_current_job() if rq is not None else None
    return new_task_id() if job is None else str(job.id)
