"""redis+sentinel://: the primary that real Sentinels name, their passwords, another primary, and who is no help."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from broker import AsyncBroker, Broker, Request
from broker.errors import BrokerUnavailable, BrokerUnsuitable
from broker.launch import free_port
from broker.redisclient import SentinelLookup
from broker.store import AsyncStore, Store
from tests.support.commands import headrace
from tests.support.fleet import until
from tests.support.player import serving
from tests.support.sentinels import SERVICE, Trio, sentinel_trio
from tests.support.servers import RealServer

pytestmark = pytest.mark.xdist_group("sentinel")

PASSWORDS = ("data-secret", "watch-secret")
WORK = Request("POST", "/v1/chat/completions", json={"model": "m"})


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    """One that no test changes."""
    with sentinel_trio(password=PASSWORDS[0], sentinel_password=PASSWORDS[1]) as running:
        yield running


@pytest.fixture
def replaceable() -> Iterator[Trio]:
    with sentinel_trio() as running:
        yield running


def checked(url: str) -> None:
    with closing(Store(url)) as store:
        store.check()


def port_of(store: Store) -> int:
    return int(store.raw(lambda client: client.info("server"))["tcp_port"])


def test_clients_find_the_primary_through_sentinels_with_passwords_of_their_own(trio: Trio) -> None:
    store = Store(trio.url)
    assert port_of(store) == trio.servers[0].port
    with Broker(trio.url) as broker, serving(trio.url, "llm"):
        assert broker.enqueue("llm", WORK).result(timeout=60).ok
        assert all(result.ok for result in broker.map("llm", [WORK] * 5, timeout=60))

        async def under_asyncio() -> bool:
            async with AsyncBroker(trio.url) as own:
                return (await (await own.enqueue("llm", WORK)).result(timeout=60)).ok

        assert asyncio.run(under_asyncio())
    store.close()


def test_commands_take_the_url_and_show_no_password(trio: Trio, tmp_path: Path) -> None:
    told = headrace("status", "--redis", trio.url, cwd=tmp_path)
    looked = headrace("doctor", "--redis", trio.url, cwd=tmp_path)
    shown = headrace("config", "show", "--redis", trio.url, cwd=tmp_path)
    assert told.returncode == 0
    assert f"{trio.hosts}/{SERVICE}/0: Redis" in looked.stdout
    assert shown.returncode == 0
    words = "".join(each.stdout + each.stderr for each in (told, looked, shown))
    assert not [secret for secret in PASSWORDS if secret in words]


def test_no_sentinel_that_answers_is_one_line(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis+sentinel://:hidden@127.0.0.1:{port}/{SERVICE}?sentinel_password=hidden"
    with pytest.raises(BrokerUnavailable, match=rf"no Sentinel answers \(.*127\.0\.0\.1:{port}"):
        checked(url)
    ended = headrace("dead", "list", "--redis", url, cwd=tmp_path)
    assert ended.returncode == 4
    assert ended.stderr.count("\n") == 1
    assert "no Sentinel answers" in ended.stderr
    assert "hidden" not in ended.stderr


def test_a_service_that_no_sentinel_knows_is_one_line_and_not_waited_for(trio: Trio) -> None:
    url = trio.url.replace(f"/{SERVICE}/", "/qeues/")
    with pytest.raises(BrokerUnsuitable, match="its Sentinels know no service 'qeues'") as caught:
        checked(url)
    assert not [secret for secret in PASSWORDS if secret in str(caught.value)]
    with pytest.raises(BrokerUnsuitable, match="its Sentinels know no service 'qeues'"):
        asyncio.run(pinged(url))


async def pinged(url: str) -> None:
    store = AsyncStore(url)
    try:
        await store.pipelined([("SET", "a", "1")])
    finally:
        await store.close()


def test_sentinels_that_want_a_password_say_so(trio: Trio) -> None:
    with pytest.raises(BrokerUnsuitable, match=r"Sentinels refuse us .* check redis\.sentinel_password"):
        checked(trio.url.partition("?")[0])


def test_a_sentinel_that_is_gone_is_passed_over(replaceable: Trio) -> None:
    replaceable.sentinels[0].kill()
    replaceable.sentinels[2].kill()
    store = Store(replaceable.url)
    assert port_of(store) == replaceable.servers[0].port
    store.close()


def name_another(trio: Trio, server: RealServer) -> None:
    """All Sentinels name this one from now on, and leave the old primary alone."""
    server.command("REPLICAOF", "NO", "ONE")
    for sentinel in trio.sentinels:
        assert sentinel.command("SENTINEL", "REMOVE", SERVICE) == b"OK"
        assert sentinel.command("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", str(server.port), "2") == b"OK"


def test_a_new_primary_is_followed_while_the_old_one_still_takes_writes(replaceable: Trio) -> None:
    """So it is after SENTINEL FAILOVER: connections live on, and what they write is lost ten seconds later."""
    old, new = replaceable.servers

    async def async_port(store: AsyncStore) -> int:
        return int((await store.pipelined([("CONFIG", "GET", "port")]))[0][b"port"])

    async def follow() -> None:
        async_store = AsyncStore(replaceable.url)
        assert (await async_port(async_store), port_of(store)) == (old.port, old.port)
        name_another(replaceable, new)
        while True:
            if await async_port(async_store) == new.port:
                break
            await asyncio.sleep(0.02)
        await async_store.close()

    store = Store(replaceable.url)
    asyncio.run(asyncio.wait_for(follow(), 30))
    until(lambda: port_of(store) == new.port, "the store speaks to the new primary", 30)
    assert b"role:master" in replaceable.info(old), "nobody has told the old one"
    store.close()


def test_a_primary_that_was_demoted_is_left(replaceable: Trio) -> None:
    """What it says to writes and to blocked calls is a lost connection: to be tried again, elsewhere."""
    old, other = replaceable.servers
    for sentinel in replaceable.sentinels[1:]:
        sentinel.kill()  # no majority: nobody interferes
    store, ended = Store(replaceable.url), []

    def wait() -> None:
        try:
            store.raw(lambda client: client.blpop(["bell"], 10))
        except BrokerUnavailable as error:
            ended.append(error)

    assert port_of(store) == old.port
    blocked = threading.Thread(target=wait)
    blocked.start()
    until(lambda: b"blocked_clients:1" in _bytes(old.command("INFO", "clients")), "it waits")
    old.command("REPLICAOF", "127.0.0.1", str(other.port))
    blocked.join(30)
    assert ended, "the blocked call ended as one whose connection was lost"
    with pytest.raises(BrokerUnavailable) as caught:
        store.pipelined([("SET", "a", "1")])
    assert caught.value.passing

    with pytest.raises(BrokerUnavailable):
        asyncio.run(pinged(replaceable.url))
    store.close()


def _bytes(reply: Any) -> bytes:
    return reply if isinstance(reply, bytes) else b""


def answer(port: int, epoch: int, flags: str = "master") -> list[bytes]:
    fields = {"ip": "10.0.0.1", "port": port, "config-epoch": epoch, "flags": flags}
    return [str(part).encode() for pair in fields.items() for part in pair]


def searched(lookup: SentinelLookup, answers: dict[int, list[bytes]]) -> tuple[int, list[int]]:
    """The port that was found, and whom the lookup asked; `answers` by the Sentinels' ports."""
    search, asked = lookup.search(), []
    try:
        (_, port), _ = next(search)
        while True:
            asked.append(port)
            (_, port), _ = search.send(answers[port])
    except StopIteration as end:
        return end.value[1], asked


def test_a_sentinel_that_has_not_heard_of_the_failover_is_not_believed() -> None:
    lookup = SentinelLookup([("s", 1), ("s", 2)], SERVICE)
    assert searched(lookup, {1: answer(6001, 4, "master,s_down"), 2: answer(6002, 5)}) == (6002, [1, 2])
    assert searched(lookup, {1: answer(6001, 4), 2: answer(6002, 5)}) == (6002, [2]), "who knew is asked first"
    assert searched(lookup, {2: answer(6001, 4), 1: answer(6002, 5)}) == (6002, [2, 1])
    assert searched(lookup, {1: answer(6003, 0), 2: answer(6003, 0)}) == (6003, [1, 2]), "they were set up anew"
