"""One real server for each test session (or xdist worker): HEADRACE_TEST_SERVER=valkey (default) or redis."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.servers import MissingServer, RealServer, redis_server

# A busy machine is no fault of what is tested.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


@pytest.fixture(scope="session")
def server() -> Iterator[RealServer]:
    """The session's server. A test that stops it, or changes its settings, takes one of its own: redis_server()."""
    kind = os.environ.get("HEADRACE_TEST_SERVER", "valkey")
    if kind not in ("valkey", "redis"):
        pytest.fail(f"HEADRACE_TEST_SERVER={kind}: must be valkey or redis")
    try:
        with redis_server("redis" if kind == "redis" else "valkey") as running:
            yield running
    except MissingServer as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def redis_url(server: RealServer) -> str:
    """The URL of the session's server, which is empty."""
    assert server.command("FLUSHALL") == b"OK"
    return server.url
