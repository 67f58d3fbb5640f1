"""One seam over the HTTP libraries: `make_transport` for an endpoint, then `send` calls through it.

Which, and why: `httptools` is our own small client over asyncio and that parser; it passes every case of the bad-server
suite at a fifth of aiohttp's CPU, which passes them too and steps in where httptools is not installed. pyreqwest runs
canceled requests on, holding their connections; until it does not, it must be asked for by name. httpx is for its
MockTransport and for clients people bring.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

from workers.transport.lean import IDLE_DISCARD_S
from workers.transport.types import Answer, Call, Timeouts, Transport

TransportName = Literal["auto", "httptools", "pyreqwest", "aiohttp", "httpx"]

# Those that pass the whole suite in tests/processes/test_transport*.py, the fastest first; the last is always there.
AUTO: Final[tuple[TransportName, ...]] = ("httptools", "aiohttp")

__all__ = ["AUTO", "Answer", "Call", "Timeouts", "Transport", "TransportName", "make_transport"]


def make_transport(
    name: TransportName = "auto",
    *,
    slots: int,
    idle_discard: float = IDLE_DISCARD_S,
    ca_file: str | None = None,
) -> Transport:
    """A transport for one endpoint: at most `slots` connections, idle ones used no more after `idle_discard` seconds.

    `ca_file` is a PEM file of authorities to trust besides the usual ones. Use it within one event loop. Raises
    ValueError for an unknown name, ImportError if the library is not installed. Libraries are imported only here.
    """
    if name == "auto":
        name = next(known for known in AUTO if find_spec(known) is not None)
    if name == "pyreqwest":
        from workers.transport.pyreqwest_ import PyreqwestTransport

        return PyreqwestTransport(slots, idle_discard, ca_file)
    if name == "httptools":
        from workers.transport.httptools_ import HttptoolsTransport

        return HttptoolsTransport(slots, idle_discard, ca_file)
    if name == "aiohttp":
        from workers.transport.aiohttp_ import AiohttpTransport

        return AiohttpTransport(slots, idle_discard, ca_file)
    if name == "httpx":
        from workers.transport.httpx_ import HttpxTransport

        return HttpxTransport(slots=slots, idle_discard=idle_discard, ca_file=ca_file)
    raise ValueError(f"transport {name!r}: must be 'auto', 'httptools', 'pyreqwest', 'aiohttp' or 'httpx'")
