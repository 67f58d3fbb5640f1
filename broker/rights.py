"""What the user of a Redis URL must be allowed to do, by role: what `headrace doctor` asks the server about.

The rules to give each role are in docs/security.md. A role is known by commands that only it needs, one for each kind
of key, not by all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from broker.keys import Keys

Role = Literal["look", "enqueue", "serve"]
Commands = tuple[tuple[Any, ...], ...]

NAME: Final = "headrace-doctor"  # of pool, task and process in these commands, none of which is run


def needed(keys: Keys) -> Mapping[Role, Commands]:
    """Commands of each role; each role needs those of the ones before it too."""
    pool = keys.pool(NAME)
    return {
        "look": (
            ("INFO",),
            ("TIME",),
            ("SMEMBERS", keys.pools()),
            ("HGETALL", pool),
            ("HMGET", keys.job(NAME), "status"),
            ("LLEN", keys.queue(NAME)),
            ("ZRANGE", keys.registry("failed", NAME), 0, 1),
        ),
        "enqueue": (
            ("EVALSHA", "0" * 40, 1, pool),
            ("EVAL", "return 1", 1, pool),
            ("HSET", keys.job(NAME), "x_born", 1),
            ("RPUSH", keys.queue(NAME), NAME),
            ("SADD", keys.queues(), NAME),
            ("ZADD", keys.registry("scheduled", NAME), 1, NAME),
            ("SET", keys.idempotency(NAME, NAME), 1),
            ("SET", keys.parts(NAME), 1),
            ("RPUSH", keys.bell(NAME), 1),
            ("BLPOP", keys.reply(NAME), 1),
            ("UNLINK", keys.job(NAME)),
        ),
        "serve": (
            ("SADD", keys.pools(), NAME),
            ("HSET", keys.endpoint(NAME, NAME), "id", NAME),
            ("ZADD", keys.slots(NAME, NAME), 1, NAME),
            ("SET", keys.ticket(NAME, NAME), 1),
            ("XADD", keys.results(NAME), "*", "type", 1),
            ("HSET", keys.worker(NAME), "state", "idle"),
            ("BLMOVE", keys.queue(NAME), keys.queue(NAME), "RIGHT", "RIGHT", 1),
            ("SCAN", 0),
        ),
    }
