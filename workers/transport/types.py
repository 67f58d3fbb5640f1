"""What a transport is given and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The limits of one attempt, in seconds. Whichever passes first ends it.

    connect     TCP (and TLS) connection
    first_byte  from the start of the attempt, connecting included, until the answer's headers are in
    idle        between two chunks of the answer's body
    attempt     the whole attempt, waiting for a connection included
    """

    connect: float = 5.0
    first_byte: float = 60.0
    idle: float = 30.0
    attempt: float = 300.0


class Call(NamedTuple):
    """One request, complete: nothing is added but Host, Content-Length, Accept-Encoding, Accept and User-Agent.

    url        absolute, http or https, percent-encoded
    body       sent as it is; b"" sends none (a POST, PUT or PATCH then has Content-Length 0)
    max_bytes  the largest body that is taken for an answer
    """

    method: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    timeouts: Timeouts = Timeouts()
    max_bytes: int = 1_048_576

    def __repr__(self) -> str:  # headers carry keys, bodies carry people's text
        return f"Call({self.method!r}, {self.url!r}, {len(self.body)} bytes)"


class Answer(NamedTuple):
    """A whole answer, of any status.

    headers           names lower-cased; of a name that came twice the values are joined by ", "
    body              as it came over the wire, never inflated. For a status outside 2xx it may be shortened to
                      `max_bytes`, and is b"" if it came compressed: the status is what counts there
    first_byte_after  seconds from the start of the attempt until the headers were in
    ended_after       seconds from the start of the attempt until the body was in
    """

    status: int
    headers: dict[str, str]
    body: bytes
    first_byte_after: float
    ended_after: float

    def __repr__(self) -> str:
        return f"Answer({self.status}, {len(self.body)} bytes, ended_after={self.ended_after:.3f})"


class Transport(Protocol):
    """Sends calls to one endpoint over at most `slots` connections. Belongs to one event loop.

    keep  connections beyond so many are closed after their answer; it may change at any time. The default transport
          keeps to it; the others keep what they like
    """

    keep: int

    async def send(self, call: Call) -> Answer:
        """The answer, whatever its status. Raises AttemptFailed if there is none, or none to be trusted.

        Redirects are not followed, cookies not kept, proxies of the environment not used, nothing inflated. Canceling
        closes the connection. If a kept connection turns out closed before any byte of an answer, the call is sent
        once more, silently.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection. Calls in flight fail."""
        ...
