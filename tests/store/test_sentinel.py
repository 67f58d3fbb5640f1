"""redis+sentinel://: the primary that real Sentinels name, their passwords, another primary, and who is no help."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from broker import AsyncBroker, Broker, Request
from broker.errors import BrokerUnavailable, BrokerUnsuitable
from broker.launch import free_port
from broker.redislookup import SentinelLookup
from broker.store import AsyncStore, Store
from tests.support.commands import headrace
from tests.support.fleet import until
from tests.support.player import serving
from tests.support.sentinels import SERVICE, Trio, sentinel_trio
from tests.support.servers import RealServer, redis_server
from tests.support.stubsentinel import stub_sentinel

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


def written_at(store: Store, key: str) -> int:
    """The port of the server that took it; 0 if none did."""
    try:
        return int(store.pipelined([("SET", key, "1"), ("CONFIG", "GET", "port")])[1][b"port"])
    except BrokerUnavailable:
        return 0


def test_an_old_primary_that_comes_back_as_one_gets_no_writes(replaceable: Trio) -> None:
    """Killed, and started again on its old port: for ten seconds nobody tells it that it has a successor.

    One Sentinel has heard of nothing. Neither who was there before nor who comes now takes its word.
    """
    old, new = replaceable.servers
    with stub_sentinel(old.port) as stale:
        url = f"redis+sentinel://127.0.0.1:{stale.port},{replaceable.hosts}/{SERVICE}/0"
        store = Store(url)
        assert written_at(store, "before") == old.port
        old.kill()
        until(lambda: replaceable.named == [new] * 3, "the Sentinels have chosen", 60)
        old.start()
        for each in (store, Store(url)):
            assert until(lambda each=each: written_at(each, "after"), "it is taken", 30) == new.port
            each.close()

        async def late() -> None:
            async_store = AsyncStore(url)
            assert (await async_store.pipelined([("CONFIG", "GET", "port")]))[0] == {b"port": b"%d" % new.port}
            await async_store.close()

        asyncio.run(late())


def test_who_looked_when_there_was_no_successor_yet_looks_again_soon() -> None:
    """The primary hangs, is given up, and goes on: until a look finds the new one, all that it takes is lost."""
    with redis_server() as old, redis_server() as new, stub_sentinel(old.port) as sentinel:
        store = Store(f"redis+sentinel://127.0.0.1:{sentinel.port}/{SERVICE}/0")
        assert written_at(store, "before") == old.port
        sentinel.flags = "master,s_down,o_down"
        asked = sentinel.asked
        until(lambda: written_at(store, "between") and sentinel.asked > asked + 2, "it looks again and again", 15)
        sentinel.primary, sentinel.epoch, sentinel.flags = new.port, 1, "master"
        until(lambda: written_at(store, "after") == new.port, "it has left", 15)
        store.close()


def test_a_replica_is_not_taken_for_the_primary(trio: Trio) -> None:
    """Not even to read: what it says may be old, and Sentinels may not know yet that it is one."""
    with stub_sentinel(trio.servers[1].port) as mistaken:
        url = f"redis+sentinel://:{PASSWORDS[0]}@127.0.0.1:{mistaken.port}/{SERVICE}/0"
        store = Store(url)
        with pytest.raises(BrokerUnavailable, match="named as the primary is a replica"):
            store.pipelined([("GET", "a")])
        store.close()
        with pytest.raises(BrokerUnavailable, match="named as the primary is a replica"):
            asyncio.run(pinged(url))


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


Answers = dict[int, list[bytes] | Exception]


def searched(lookup: SentinelLookup, answers: Answers, successor: int = 0) -> tuple[int, list[int]]:
    """The port that was found, and whom the lookup asked; `answers` by the Sentinels' ports.

    `successor`: the port that who leads a failover names, when asked for the address alone.
    """
    asked: list[int] = []

    async def ask(sentinel: tuple[str, int], command: tuple[str, ...]) -> Any:
        if command[1] == "GET-MASTER-ADDR-BY-NAME":
            return [b"10.0.0.1", b"%d" % successor]
        asked.append(sentinel[1])
        return answers[sentinel[1]]

    return asyncio.run(lookup.search(ask))[1], asked


def lookup_of(*ports: int) -> SentinelLookup:
    return SentinelLookup([("s", port) for port in ports], SERVICE)


GONE = ConnectionError("gone")


def test_a_primary_is_believed_when_most_sentinels_name_it() -> None:
    lookup = lookup_of(1, 2, 3)
    stale, fresh = answer(6001, 4), answer(6002, 5)
    assert searched(lookup, {1: stale, 2: fresh, 3: fresh}) == (6002, [1, 2, 3])
    assert searched(lookup, {1: stale, 2: fresh, 3: fresh}) == (6002, [2, 3]), "who agreed is asked first"
    assert searched(lookup_of(1, 2, 3), {1: fresh, 2: fresh, 3: GONE}) == (6002, [1, 2]), "most are enough"
    assert searched(lookup_of(1, 2, 3), {1: GONE, 2: GONE, 3: fresh}) == (6002, [1, 2, 3]), "one, when no more answer"


def test_a_sentinel_that_has_not_heard_of_the_failover_is_not_believed() -> None:
    lookup = lookup_of(1, 2)
    assert searched(lookup, {1: answer(6001, 4, "master,s_down"), 2: answer(6002, 5)}) == (6002, [1, 2])
    assert searched(lookup, {1: answer(6001, 4), 2: answer(6002, 5)}) == (6002, [2, 1])
    with pytest.raises(RedisConnectionError, match=r"has not heard of the last failover \(s:2: gone\)"):
        searched(lookup, {1: answer(6001, 4), 2: GONE})
    assert lookup.found == ("10.0.0.1", 6002)
    assert searched(lookup, {2: answer(6003, 0), 1: answer(6003, 0)}) == (6003, [2, 1]), "they were set up anew"


def test_a_primary_that_most_sentinels_hold_for_down_is_not_connected_to() -> None:
    down, up = answer(6001, 4, "master,s_down,o_down"), answer(6001, 4)
    assert searched(lookup_of(1, 2, 3), {1: down, 2: up, 3: up}) == (6001, [1, 2, 3])
    with pytest.raises(RedisConnectionError, match=r"10\.0\.0\.1:6001 of 'queues' is down, and has no successor yet"):
        searched(lookup_of(1, 2, 3), {1: down, 2: up, 3: down})


def test_who_leads_a_failover_is_asked_for_the_successor() -> None:
    """SENTINEL MASTER shows the old primary there, with the new epoch, until all replicas follow the new one."""
    leading = answer(6001, 5, "master,failover_in_progress")
    lookup = lookup_of(1, 2)
    assert searched(lookup, {1: leading, 2: answer(6001, 4)}, successor=6002) == (6002, [1, 1, 2])
    assert searched(lookup, {1: leading, 2: answer(6002, 5)}, successor=6002) == (6002, [1, 1, 2])
    assert searched(lookup_of(1), {1: answer(6001, 4, "master,failover_in_progress")}, successor=6001) == (6001, [1])


def test_who_began_to_look_before_a_failover_does_not_have_the_last_word() -> None:
    lookup = lookup_of(1, 2)
    late = lookup.search(lambda sentinel, command: Later())
    late.send(None)
    assert searched(lookup, {1: answer(6002, 5), 2: answer(6002, 5)}) == (6002, [1, 2])
    late.send(answer(6001, 4))
    with pytest.raises(StopIteration, match="6002"):
        late.send(answer(6001, 4))
    assert lookup.found == ("10.0.0.1", 6002)


class Later:
    """Waits for what is sent."""

    def __await__(self) -> Generator[None, Any, Any]:
        return (yield)
