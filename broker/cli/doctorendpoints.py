"""`headrace doctor` on endpoints: asked as workers ask them, key included, so that it tells what workers will meet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from broker.cli.finding import Finding
from broker.config import Config, Endpoint, Pool
from broker.task import Request

if TYPE_CHECKING:
    from workers.transport import Answer, Transport

AT_ONCE: Final = 32
MODELS: Final = "/v1/models"  # servers often let anybody ask for their health, and nobody for this
NO_SUCH_ROUTE: Final = (404, 405, 501)
REFUSED: Final = (401, 403)
ANSWER_LIMIT: Final = 65_536  # bytes
KEY: Final = "check api_key, hmac_secret or headers of this endpoint"


def look_at_endpoints(config: Config) -> Iterator[Finding]:
    """Every enabled endpoint, side by side; then the pools that nobody can serve."""
    every = [(pool, endpoint) for pool in config.pools.values() for endpoint in pool.enabled]
    if not every:
        yield Finding("warning", "endpoints", "none is configured; `run` takes them with --endpoint")
        return
    found = asyncio.run(_look_at_all(every))
    yield from (finding for finding, _ in found)
    for pool in config.pools.values():
        usable = [serves for (owner, _), (_, serves) in zip(every, found, strict=True) if owner is pool]
        if usable and not any(usable):
            yield Finding("failed", f"pool {pool.name}", "no endpoint of it can serve now: its tasks wait; see above")


# What is said of an endpoint, and whether a worker would give it tasks.
Look = tuple[Finding, bool]


async def _look_at_all(every: list[tuple[Pool, Endpoint]]) -> list[Look]:
    room = asyncio.Semaphore(AT_ONCE)

    async def look(pool: Pool, endpoint: Endpoint) -> Look:
        async with room:
            return await _look_at(pool, endpoint)

    return list(await asyncio.gather(*(look(*pair) for pair in every)))


async def _look_at(pool: Pool, endpoint: Endpoint) -> Look:
    from workers.errors import AttemptFailed
    from workers.transport import make_transport

    what, transport = f"endpoint {endpoint.id}", make_transport(pool.connection.transport, slots=1)

    async def ask(request: Request) -> Look | None:
        return _judge(what, endpoint, request, await _ask(pool, endpoint, transport, request))

    try:
        health = Request("GET", pool.health.path)
        complaint = await ask(health)
        if complaint is None and pool.health.probe is not None:
            complaint = await ask(pool.health.probe)
        elif complaint is None and endpoint.api_key is not None and pool.adapter == "http":
            with suppress(AttemptFailed):  # a long list of models, say
                asked = await ask(Request("GET", MODELS))
                complaint = asked if asked is not None and asked[0].word == "failed" else None
        return complaint or (Finding("ok", what, f"{endpoint.url} answers GET {health.path}"), True)
    except AttemptFailed as failure:
        return Finding("warning", what, f"{endpoint.url} does not answer: {failure}; tasks go to the others"), False
    finally:
        await transport.aclose()


async def _ask(pool: Pool, endpoint: Endpoint, transport: Transport, request: Request) -> Answer:
    from workers.adapters import make_adapter
    from workers.transport import Timeouts

    limit = pool.health.timeout
    call = make_adapter(endpoint, pool).call(request, f"doctor-{endpoint.id}", 1)
    call = call._replace(timeouts=Timeouts(limit, limit, limit, limit), max_bytes=ANSWER_LIMIT)
    return await transport.send(call)


def _judge(what: str, endpoint: Endpoint, request: Request, answer: Answer) -> Look | None:
    """What is wrong with an answer; None if nothing."""
    status, asked = answer.status, f"{request.method} {request.path}"
    if 200 <= status < 300:
        return None
    told = f"{endpoint.url} answers {status} to {asked}"
    if status in REFUSED:
        return Finding("failed", what, f"{told}: it refuses our key; {KEY}"), False
    if status in NO_SUCH_ROUTE:
        text = f"{told}: is that path, or the one in the endpoint's url, right?"
        return Finding("warning", what, text), request.method == "GET"  # as workers see it; a probe must succeed
    if 300 <= status < 400:
        return Finding("warning", what, f"{told}: redirects are not followed; correct the endpoint's url"), False
    return Finding("warning", what, f"{told}; tasks go to the others"), False
