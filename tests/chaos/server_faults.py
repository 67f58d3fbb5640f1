"""The server goes, hangs, refuses, forgets. Rows 7 to 9, 12, 17."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from broker.errors import BrokerError
from tests.chaos.scenarios import scenario, volleys
from tests.chaos.world import World
from tests.support.fleet import ROOT
from tests.support.sentinels import DEMOTED, SYNCED, Trio
from tests.support.servers import RealServer, redis_server

RESUME_S = 5.0  # after a restart; no lease has to run out for it
FAILOVER_S = 30.0  # from the fault to the next outcome
BUSY_LUA = "local until_ = tonumber(ARGV[1]) while true do if redis.call('TIME')[1] * 1 >= until_ then return 1 end end"


@scenario(7, 4)
def restart_server(world: World, budget: int) -> None:
    """SIGTERM and start again, with the append-only file."""
    for _ in range(min(budget, 4)):
        world.pause(0.5, 1.5)
        held = world.observer.in_flight()
        began = time.time()
        world.server.restart()
        world.fault("server restarted", held, reruns=False, since=began, resume=RESUME_S)
        world.flowing(10)


def _at_least(tasks: list[str], number: int) -> list[str]:
    return tasks if len(tasks) >= number else []


def _kill_server(world: World, budget: int) -> None:
    for _ in range(min(budget, 4)):
        world.pause(0.5, 1.5)
        world.server.pause()
        began = time.time()
        world.server.kill()
        world.server.start()
        held = world.observer.in_flight()
        world.fault("server killed", held, reruns=True, since=began, resume=RESUME_S)
        world.flowing(10)


@scenario(7, 4, server={"appendfsync": "everysec"})
def kill_server(world: World, budget: int) -> None:
    """kill -9 of the server, synced each second: what was acknowledged in its last moments may go."""
    _kill_server(world, budget)


@scenario(7, 4, server={"appendfsync": "always"})
def kill_synced_server(world: World, budget: int) -> None:
    """kill -9 of a server that syncs before it answers: nothing may go."""
    _kill_server(world, budget)


def _is_replica(trio: Trio, server: RealServer) -> bool:
    with suppress(OSError):  # it drops its clients when it becomes one
        return b"role:slave" in trio.info(server)
    return False


def _by_itself(world: World, asked: int, replaced_at: float) -> int:
    """Notes the failovers after the first `asked`: Sentinels that were starved took a server for dead.

    The new primary may be one that was replaced, at `replaced_at`, and came back with what it had then. Returns how
    many there have been in all.
    """
    found = world.trio.failovers()
    for each in found[asked:]:
        synced = any(replaced_at < at < each.at for at in world.trio.server(each.new).moments(SYNCED))
        left = [at for at in world.trio.server(each.old).moments(DEMOTED) if at > each.at]
        began, until = each.at if synced else replaced_at, min(left, default=time.time())  # it takes writes until told
        world.fault("failover by itself", reruns=True, since=began, lost_until=until + 0.2)
        world.forget_lost()
    return len(found)


@scenario(7, 4, sentinels=True)
def sentinel_failover(world: World, budget: int) -> None:
    """kill -9 of the primary, and SENTINEL FAILOVER, in turn: the replica takes over."""
    trio, began, asked = world.trio, 0.0, 0
    for number in range(min(budget, 4)):
        trio.settled()
        asked = _by_itself(world, asked, began)
        world.pause(0.5, 1.5)
        old, held, began = trio.primary, world.observer.open_tasks(), time.time()
        if number % 2:
            trio.order()
        else:
            old.kill()
        world.until(lambda before=old: before not in trio.named, "every Sentinel names the new primary", 30)  # type: ignore[misc]
        if old.running:  # it takes writes, which will be lost, until the Sentinels have made it a replica
            world.until(lambda before=old: _is_replica(trio, before), "the old primary is a replica", 30)  # type: ignore[misc]
        left = max(1.0, began + FAILOVER_S - time.time())
        if old.running:
            lost_until = time.time() + 0.2
            world.fault("failover by order", held, reruns=True, since=began, lost_until=lost_until, resume=left)
        else:
            world.fault("primary killed", held, reruns=True, since=began, lost_until=began + 0.2, resume=left)
            old.start()
        world.forget_lost()
        world.flowing(left)
        asked += 1
    trio.settled()
    _by_itself(world, asked, began)


@scenario(8, 2, lease=3.0, latency="1500ms", jitter="500ms", slots=70, outstanding=260, batch=50)
def server_away(world: World, budget: int) -> None:
    """Away for two leases, 200 tasks in flight: when it is back every lease looks expired, and nothing runs twice."""
    for _ in range(min(budget, 2)):
        held = world.until(lambda: _at_least(world.observer.in_flight(), 200), "200 tasks are in flight")
        began = time.time()
        world.server.stop()
        world.pause(world.settings.lease * 2)
        world.server.start()
        world.fault("server away for two leases", held, reruns=False, since=began)
        world.flowing(15)


@scenario(9, 4)
def hang_server(world: World, budget: int) -> None:
    """SIGSTOP of the server for longer than a lease, and less."""
    for _ in range(min(budget, 4)):
        world.pause(0.5, 1.0)
        held = world.observer.in_flight()
        began = time.time()
        world.server.pause()
        world.pause(0.2, world.settings.lease * 1.5)
        world.server.resume()
        world.fault("server hung", held, reruns=False, since=began)
        world.flowing(15)


@scenario(9, 3)
def sleep_server(world: World, budget: int) -> None:
    """DEBUG SLEEP for three leases: one command holds the server."""
    for _ in range(min(budget, 3)):
        world.pause(0.3, 0.8)
        held, began = world.observer.in_flight(), time.time()
        end = began + world.settings.lease * 3
        _quietly(world, "DEBUG", "SLEEP", f"{world.settings.lease * 3:g}")
        world.pause(max(0.0, end - time.time()))
        world.fault("DEBUG SLEEP for three leases", held, reruns=False, since=began)
        world.flowing(15)


@scenario(9, 250)
def kill_clients(world: World, budget: int) -> None:
    """CLIENT KILL of every connection, several times a second."""

    def inject() -> int:
        world.server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        return 1

    volleys(world, "CLIENT KILL", budget, 25, inject, 0.02, 0.15)


@scenario(9, 350)
def flush_scripts(world: World, budget: int) -> None:
    """SCRIPT FLUSH, over and over."""

    def inject() -> int:
        world.server.command("SCRIPT", "FLUSH")
        return 1

    volleys(world, "SCRIPT FLUSH", budget, 50, inject, 0.0, 0.05)


@scenario(9, 4)
def pause_clients(world: World, budget: int) -> None:
    """CLIENT PAUSE: connections stay, nothing is answered, for longer than a lease."""
    for _ in range(min(budget, 4)):
        held = world.observer.in_flight()
        began = time.time()
        seconds = world.rng.uniform(0.5, world.settings.lease * 1.5)
        world.server.command("CLIENT", "PAUSE", str(int(seconds * 1000)), world.rng.choice(["ALL", "WRITE"]))
        world.pause(seconds)
        world.fault("CLIENT PAUSE", held, reruns=False, since=began)
        world.flowing(15)


@scenario(9, 3, server={"busy-reply-threshold": "200"})
def busy_server(world: World, budget: int) -> None:
    """Somebody's script runs for seconds: everybody is told BUSY."""
    for _ in range(min(budget, 3)):
        world.pause(0.3, 0.6)
        held = world.observer.in_flight()
        began = time.time()
        end = str(int(time.time()) + 3)
        slow = threading.Thread(target=_quietly, args=(world, "EVAL", BUSY_LUA, "0", end))
        slow.start()
        slow.join()
        world.fault("server busy with a script", held, reruns=False, since=began)
        world.flowing(15)


def _quietly(world: World, *words: str) -> None:
    with suppress(OSError):
        world.server.command(*words)


@scenario(9, 3)
def read_only(world: World, budget: int) -> None:
    """The server becomes a replica of one that is not there, and a primary again."""
    for _ in range(min(budget, 3)):
        world.pause(0.3, 0.6)
        held = world.observer.in_flight()
        began = time.time()
        world.server.command("REPLICAOF", "127.0.0.1", "1")
        world.pause(0.5, world.settings.lease * 1.5)
        world.server.command("REPLICAOF", "NO", "ONE")
        world.fault("server read-only", held, reruns=False, since=began)
        world.flowing(15)


@scenario(12, 3, latency="2500ms", jitter="500ms", slots=8, outstanding=60)
def memory_full(world: World, budget: int) -> None:
    """maxmemory is reached, with tasks that run for longer than a lease: producers are refused, the rest goes on."""
    for _ in range(min(budget, 3)):
        world.pause(0.5)
        held = world.observer.in_flight()
        refused = world.refused
        began = time.time()
        world.server.command("CONFIG", "SET", "maxmemory", "1mb")
        world.until(lambda had=refused: world.refused > had, "a producer is told", 20)  # type: ignore[misc]
        world.until(lambda ran=held: not set(ran) & set(world.observer.open_tasks()), "it has its outcome", 30)  # type: ignore[misc]
        leaving = world.rng.choice(world.pids)  # it drains although the memory is full
        os.kill(leaving, signal.SIGTERM)
        world.until(lambda pid=leaving: pid not in world.pids, "a process has drained", 30)  # type: ignore[misc]
        world.fault("memory full", [], reruns=False, pid=leaving, count=0)
        world.server.command("CONFIG", "SET", "maxmemory", "0")
        world.complete()
        world.fault("memory full", held, reruns=False, since=began)
        world.flowing()


@scenario(17, 3)
def unsuitable_server(world: World, budget: int) -> None:
    """A worker refuses to start on a server that evicts, and names the setting."""
    for policy in ("allkeys-lru", "volatile-ttl", "allkeys-random")[:budget]:
        with redis_server(config={"maxmemory-policy": policy}) as server:
            command = [sys.executable, "-m", "broker.cli", "worker", "-c", str(world.fleets[0].file)]
            command += ["--redis", server.url]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        if ended.returncode == 0 or "maxmemory-policy" not in ended.stderr + ended.stdout:
            raise AssertionError(f"not refused: status {ended.returncode}, {ended.stderr}")
        world.fault("unsuitable server", [], reruns=False)
    with suppress(BrokerError):
        world.flowing()
