-- register: the pool's policies and endpoints, as the configuration has them. Running state is kept.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, m, then m pairs (policy field, value), n, then n times 7:
--         endpoint, priority, cap, on 0|1, capabilities (comma separated), floor, ceiling (0 0: a fixed cap)
-- Returns the ids of endpoints that are gone from the configuration.
-- needs: select

local now = server_ms()
local m = tonumber(ARGV[3])
write_when_full()
call('SADD', P .. ':x:pools', pool)
call('SADD', K_QUEUES, K_QUEUE)
for i = 1, m do call('HSET', K_POOL, ARGV[3 + i * 2 - 1], ARGV[3 + i * 2]) end
local base = 4 + m * 2
local kept = {}
for i = 1, tonumber(ARGV[base]) do
  local at = base + (i - 1) * 7
  local id = ARGV[at + 1]
  kept[id] = true
  call('SADD', K_ENDPOINTS, id)
  local key = endpoint_key(id)
  call('HSET', key, 'priority', ARGV[at + 2], 'on', ARGV[at + 4], 'capabilities', ARGV[at + 5], 'seen', int(now), 'gone',
    '0')
  if ARGV[at + 7] == '0' then
    call('HSET', key, 'cap', ARGV[at + 3])
    -- All that was measured too: `auto` again begins anew, not with a measurement that began back then.
    call('HDEL', key, 'auto', 'floor', 'ceiling', 'a_step', 'a_phase', 'a_n', 'a_at', 'a_low', 'a_rate', 'a_slots',
      'a_rounds', 'a_limit', 'a_cut')
  else
    -- What `auto` has found is kept.
    local found = call('HGET', key, 'auto') == '1' and tonumber(call('HGET', key, 'cap') or '') or tonumber(ARGV[at + 3])
    found = math.max(tonumber(ARGV[at + 6]), math.min(tonumber(ARGV[at + 7]), found))
    call('HSET', key, 'auto', '1', 'floor', ARGV[at + 6], 'ceiling', ARGV[at + 7], 'cap', int(found))
  end
end
local gone = {}
for _, id in ipairs(call('SMEMBERS', K_ENDPOINTS)) do
  if not kept[id] then
    gone[#gone + 1] = id
    call('HSET', endpoint_key(id), 'on', '0', 'gone', '1') -- reap removes it when its last slot is free
    if call('ZCARD', slots_key(id)) == 0 then
      call('SREM', K_ENDPOINTS, id)
      call('DEL', endpoint_key(id))
    end
  end
end
announce(now, spill_after())
return gone
