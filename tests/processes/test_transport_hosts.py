"""An endpoint whose host cannot be asked for: its own fault, on every transport, so tasks go elsewhere."""

from __future__ import annotations

import pytest

from tests.support.endpoints import BadServer
from tests.support.transports import PATIENT, WHOLE, every, every_loop, play, sends
from workers.errors import AttemptFailed
from workers.transport import Call, Transport, TransportName


@every_loop
@every
@pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..b", "xn--\u00f6" + "a" * 64])
def test_a_host_that_no_resolver_can_take(name: TransportName, loop: str, host: str) -> None:
    async def scenario(server: BadServer, transport: Transport) -> None:
        for _ in range(2):  # what was remembered says the same
            with pytest.raises(AttemptFailed) as caught:
                await transport.send(Call("POST", f"http://{host}:80/v1", body=b"{}", timeouts=PATIENT))
            assert (caught.value.kind, caught.value.rule.fault) == ("connect", "endpoint")
            assert "correct the endpoint's url" in caught.value.detail

    play(name, loop, sends(WHOLE), scenario)
