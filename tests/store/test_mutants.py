"""Does the model notice? Each mutant is one change to the Lua sources that somebody might make by accident; a short run
of the model, the same every time, must find it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from broker.scripts import VERBS, load
from broker.store import Store
from tests.store.conftest import Servers
from tests.support.machine import adapting_walk, walk
from tests.support.stores import open_edited_store

RUNS = 160  # at most; most mutants die in the first few


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in each script that has it, and becomes `new`."""

    name: str
    old: str
    new: str

    def edit(self, source: str) -> str:
        assert source.count(self.old) <= 1, f"mutant {self.name}: its text stands more than once; make it longer"
        return source.replace(self.old, self.new)


MUTANTS = [
    Mutant("no fence", "if task.lease == lease then", "if true then"),
    Mutant("every task in hand is plain", " and has_only(id, LEASED)", ""),
    Mutant("every waiting task is plain", " and has_only(id, PLAIN)", ""),
    Mutant("one option is no option", " and call('HEXISTS', key, 'x_dig') == 1", ""),
    Mutant("all digests are the same", "if digest == '' then return true end", "if true then return true end"),
    Mutant("own repeat is lost", "task.done == lease or", ""),
    Mutant("own finish repeated is lost", " or task.done == fence_of(lease)", ""),
    Mutant("own view though others wait", "and #view.waiting == 0 and", "and"),
    Mutant("own view though tasks exclude", " and not any_excludes(view.variants)", ""),
    Mutant("slot stays taken", "call('ZREM', slots_key(endpoint), id)\n  call('ZREM', K_WIP", "call('ZREM', K_WIP"),
    Mutant("mirror stays", "  call('ZREM', K_WIP, id .. ':' .. lease)\nend", "end"),
    Mutant("exclusions ignored", "if not excluded[endpoint.id] then", "if true then"),
    Mutant("exclusions for ever", "class.allowed = any_live and rest or capable", "class.allowed = rest"),
    Mutant("no exclusion on retry", "if ARGV[at + 8] == '1' then exclude(id, endpoint) end", ""),
    Mutant(
        "retry counts no attempt",
        "count(key, 'x_try')\n    call('HSET', key, 'x_done'",
        "call('HSET', key, 'x_done'",
    ),
    Mutant("capabilities ignored", "has = has and own[needed]", "has = true"),
    Mutant("epoch ignored", "epoch_of(lease) == (tonumber(record[7] or '') or 0)", "true"),
    Mutant("two probes", "free = (record[11] and call('ZSCORE', slots_key(id), record[11])) and 0 or 1", ""),
    Mutant("half-open never closes", "if good >= wanted then", "if false then"),
    Mutant("cooldown does not double", "cooldown = math.min(last * 2,", "cooldown = math.min(last,"),
    Mutant("success keeps the failures", "if record[2] and record[2] ~= '0' then", "if false then"),
    Mutant(
        "newest first",
        "call(front and 'LPUSH' or 'RPUSH', list_key(variant), id)",
        "call('LPUSH', list_key(variant), id)",
    ),
    Mutant(
        "released to the end",
        "call(front and 'LPUSH' or 'RPUSH', list_key(variant), id)",
        "call('RPUSH', list_key(variant), id)",
    ),
    Mutant("no aging of lists", "if falls(beat, 5 / 64) then return lists[2], false end", ""),
    Mutant("no aging of classes", "sort_classes(classes, falls(turn, 1 / 8))", "sort_classes(classes, false)"),
    Mutant("cap ignored", "whole_of(record[15], cap)) - in_flight)", "whole_of(record[15], cap)))"),
    Mutant("pause ignored", "if in_service and pause <= now then", "if in_service then"),
    Mutant("earlier pause wins", "if now + pause > earlier then", "if true then"),
    Mutant("siblings get nothing", "if siblings > 0 then", "if false then"),
    Mutant("dead processes trusted", "and (rung == 0 or now - rung < spill)", ""),
    Mutant("taken twice", "- held[endpoint.id] - taken)", "- held[endpoint.id] - 2 * taken)"),
    Mutant("lowest tier first", "function(a, b) return a > b end", "function(a, b) return a < b end"),
    Mutant(
        "fills by id",
        "if load_a ~= load_b then return load_a < load_b end\n  if a.last ~= b.last then return a.last < b.last end",
        "",
    ),
    Mutant("no bell", "call('LPUSH', bell, 'work')", ""),
    Mutant("id told twice", "if call('EXISTS', job_key(id)) == 1 then\n    return", "if false then\n    return"),
    Mutant("idempotency key forgotten", "if idem ~= '' then\n    local found", "if false then\n    local found"),
    Mutant("no depth limit", "if not word and room <= 0 then", "if false then"),
    Mutant("deadline missed in the list", "(tonumber(task[5] or '') or now + 1) <= now", "false"),
    Mutant(
        "deadline ends what runs",
        "if status == 'started' then\n    call('ZADD', K_DEADLINES",
        "if false then\n    call('ZADD', K_DEADLINES",
    ),
    Mutant("canceled task leaves its slot early", "call('HSET', key, 'x_lease', task[5], 'x_ep', task[6])", ""),
    Mutant("never poison", "if lost >= most then", "if false then"),
    Mutant(
        "reaped to the head", "schedule(id, now + math.min(30000, 500 * 2 ^ (lost - 1)))", "make_ready(id, now, true)"
    ),
    Mutant(
        "reaps live leases",
        "ZRANGEBYSCORE', slots_key(endpoint), '-inf', int(now)",
        "ZRANGEBYSCORE', slots_key(endpoint), '-inf', '+inf'",
    ),
    Mutant(
        "redrive keeps exclusions",
        "'x_try', 'x_excl', 'x_del', 'x_sus', 'x_dl', 'x_ans', 'exc_info', 'ended_at')",
        "'x_try', 'x_del', 'x_sus', 'x_dl', 'x_ans', 'exc_info', 'ended_at')",
    ),
    Mutant("redrive of what succeeded", "if outcome == 'ok' then word = 'done'\n    elseif", "if"),
    Mutant("a repeat counts for the breaker", "if #kept == #late then return false end", ""),
    Mutant(
        "a late failure never counts",
        "if word ~= 'lost' then return word ~= 'already' end",
        "do return word == 'done' end",
    ),
    Mutant("a late failure counts each time", "then call('HDEL', job_key(id), 'x_late')", "then"),
    Mutant("redrive forgets the idempotency key", "hold_idem(id)\n      make_ready", "make_ready"),
    Mutant("purge of what still runs", "and not task[3] and 'purged'", "and 'purged'"),
    Mutant("purge of what waits", "(task[2] or ENDED[task[1]]) and", ""),
    Mutant("purge leaves the key", "then call('DEL', key) end", "then end"),
    Mutant("purge leaves the registry", "call('ZREM', registry, id)", ""),
    Mutant("no amnesty", "return amnesty and {} or call(", "return call("),
    Mutant("amnesty each time", "now - last > lease_ms / 2", "true"),
    Mutant("amnesty never again", "now - last > lease_ms / 2", "false"),
    Mutant("contact is not noted", "'contact', int(now), ", ""),
    Mutant("suspects all at once", "if suspect and not takes_turn(id, now) then", "if false then"),
    Mutant("a suspect goes to the end", "else make_ready(id, now, suspect) end", "else make_ready(id, now) end"),
    Mutant("a suspect keeps its turn for ever", "and now - at < SUSPECT_WAITS", ""),
    Mutant("a suspect that runs has no turn", "task[1] == 'started' or task[1] == 'queued'", "task[1] == 'queued'"),
    Mutant("redrive keeps the suspicion", "'x_del', 'x_sus', 'x_dl', 'x_ans'", "'x_del', 'x_dl', 'x_ans'"),
    Mutant("outcome without TTL", "if ttl > 0 then call('PEXPIRE', key, int(ttl)) else", "if false then else"),
    Mutant("all slots at once", "ramp = ramp * 2", "ramp = cap"),
    Mutant("drain ignored", " and record[10] ~= '1'", ""),
    Mutant("unhealthy endpoint claims", " and record[13] ~= '0'", ""),
    Mutant(
        "renews what is lost",
        "if word == 'held' or word == 'canceled' then\n    call('ZADD'",
        "if true then\n    call('ZADD'",
    ),
    Mutant("ticket for everybody", "if ARGV[6] == '1' and call('GET', key) == ARGV[4] then", "if ARGV[6] == '1' then"),
    Mutant("ticket not again", "if ARGV[6] == '1' and call('GET', key) == ARGV[4] then", "if false then"),
    Mutant("watch tells nobody", "call('HSET', key, 'x_reply', table.concat(names, ','))", ""),
    Mutant("watch forgets who waits already", "names[#names + 1] = ARGV[3]", "names = {ARGV[3]}"),
    Mutant(
        "what is settled is watched",
        "elseif task[2] or task[1] == 'finished' or task[1] == 'failed' or task[1] == 'canceled' then word",
        "elseif false then word",
    ),
    Mutant("earlier window forgotten", "old_n = tonumber(string.match(record_n or '', ' (%d+)$')) or 0", ""),
    Mutant("rate without successes", "if window > 0 then fields = rate_with(", "if false then fields = rate_with("),
    Mutant("rate without what a 4xx says", "if state ~= 'half_open' and rate_window() > 0 then", "if false then"),
    Mutant("an answer is no check", "if record[9] then fields[n + 5]", "if false then fields[n + 5]"),
    Mutant("served counts one a call", "whole_of(record[11]) + count", "whole_of(record[11]) + 1"),
    Mutant("no turns among equals", "int(before_these + at)", "int(before_these)"),
    Mutant(
        "half of the tier is not looked at",
        "if child < size and before(heap[child + 1], heap[child]) then",
        "if false then",
    ),
    Mutant("rate never opens", "elseif too_many then", "elseif false then"),
    Mutant("rate outlives the breaker", "'rate_at', 'rate_n', 'rate_f', 'ramp', 'ramp_ok')", "'ramp', 'ramp_ok')"),
    Mutant("finished slots stay taken", "call_with('ZREM', slots_key(endpoint), ids)", "local _ = ids"),
    Mutant("finished mirrors stay", "if #mirror > 0 then", "if false then"),
    Mutant("reply list not told", "call_with('RPUSH', reply, ids)", "local _ = ids"),
    Mutant("claimed and not leased", "call_with('ZADD', key, sums.members[key])", "local _ = key"),
    Mutant("all get the first one's answer", "'x_ans', ARGV[at + 4]", "'x_ans', ARGV[4 + 4]"),
    Mutant("all fail with the first one's answer", "'x_ans', ARGV[at + 6]", "'x_ans', ARGV[5 + 6]"),
    Mutant("all fail with the first one's history", "ARGV[at + 7] .. '\\n'\n", "ARGV[5 + 7] .. '\\n'\n"),
    Mutant("all are tried again with the first one's history", "ARGV[at + 7] .. '\\n')", "ARGV[3 + 7] .. '\\n')"),
    Mutant("removed endpoint comes back", "if known(ARGV[5 + i]) then", "if true then"),
]

ADAPTING = [  # of adapt.lua and what feeds it
    Mutant(
        "slots that adapt never grow",
        "else set_slots(key, record, record.cap * 2, 'grow') end\n    return",
        "end\n    return",
    ),
    Mutant(
        "slots grow beyond the ceiling",
        "math.max(record.floor, math.min(record.most,",
        "math.max(record.floor, math.min(1e6,",
    ),
    Mutant("slots shrink below the floor", "math.max(record.floor,", "math.max(1,"),
    Mutant("grows though it does not pay", "if not record.rate or pays(record, rate) then", "if true then"),
    Mutant("slots that lie idle count", "if record.low >= 0.7 * record.cap then", "if true then"),
    Mutant("too much is said each time", "if not record or now - record.cut < 1000 then", "if not record then"),
    Mutant("too much is not remembered", "'a_limit', int(record.cap), ", ""),
    Mutant("too much is remembered for ever", "(limit and now - cut < REMEMBER)", "limit"),
    Mutant("no look at more slots", "== LOOK_EVERY and record.cap < record.most", "== LOOK_EVERY and false"),
    Mutant(
        "more slots that do not pay are kept",
        "    if pays(record, rate) then\n      keep",
        "    if true then\n      keep",
    ),
    Mutant("fewer slots that do less are kept", "if rate >= record.rate * 0.97 then", "if true then"),
    Mutant("what auto found is forgotten", "call('HGET', key, 'auto') == '1' and tonumber", "false and tonumber"),
    Mutant("an old measurement goes on", "'a_step', 'a_phase', 'a_n', 'a_at', 'a_low',", "'a_step',"),
    Mutant("adapts when it must not", "call('HDEL', key, 'auto', 'floor'", "call('HDEL', key, 'floor'"),
    Mutant(
        "in flight counts what ended",
        "call('ZCARD', slots_key(endpoint)) + answered[endpoint])",
        "call('ZCARD', slots_key(endpoint)) + answered[endpoint] - 1)",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_the_model_kills(mutant: Mutant, servers: Servers) -> None:
    with _mutated(mutant, servers) as store, pytest.raises(AssertionError):
        walk(store, runs=RUNS)


@pytest.mark.parametrize("mutant", ADAPTING, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_the_model_kills_what_adapts_wrongly(mutant: Mutant, servers: Servers) -> None:
    with _mutated(mutant, servers) as store, pytest.raises(AssertionError):
        adapting_walk(store, runs=6)


@contextmanager
def _mutated(mutant: Mutant, servers: Servers) -> Iterator[Store]:
    sources = [load(verb).source for verb in VERBS]
    assert any(mutant.old in source for source in sources), f"mutant {mutant.name}: no source has its text any longer"
    store = open_edited_store(servers["valkey"].unix_url, mutant.edit)
    yield store
    store.close()
