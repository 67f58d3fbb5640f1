-- reap: started, lease expired by the server's time -> scheduled with backoff, or poison after max_deliveries.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, max deliveries, dead letter ttl ms, lease ms
-- Returns {requeued, poisoned, freed}; freed: slots of tasks that had an outcome already. At most 100 an endpoint.
-- Never straight to the head: whatever ended its process must not come first. Before its last delivery a task becomes a
-- suspect: see promote_due. Nothing is reaped during an amnesty, which contact.lua decides.
-- needs: contact, lease, ready

local now = server_ms()
local most, dead_ttl = tonumber(ARGV[3]), tonumber(ARGV[4])
local requeued, poisoned, freed = 0, 0, 0
call('PERSIST', K_POOL) -- a write that Redis allows when its memory is full opens the door
local amnesty = now < in_contact(now, tonumber(ARGV[5]))

local function lose(id, endpoint)
  local key = job_key(id)
  local lost = count(key, 'x_del')
  local line = string.format('{"endpoint":"%s","kind":"lease_lost","at":%d}\n', endpoint, now)
  local history = (call('HGET', key, 'x_hist') or '') .. line
  if lost >= most then
    local why = string.format('poison: delivered %d times and no process lived to settle it', lost)
    conclude(id, 'poison', 'failed', now, dead_ttl, {'x_why', why, 'exc_info', why, 'x_hist', history})
    poisoned = poisoned + 1
  else
    call('HDEL', key, 'x_lease', 'x_ep', 'x_run')
    call('HSET', key, 'x_hist', history)
    if lost >= 2 and lost == most - 1 then call('HSET', key, 'x_sus', 1) end
    schedule(id, now + math.min(30000, 500 * 2 ^ (lost - 1)))
    call('HINCRBY', K_POOL, 'n_reaped', 1)
    requeued = requeued + 1
  end
end

local silent = call('HGETALL', K_WAITING)
for at = 1, #silent, 2 do
  local spoke = tonumber(string.match(silent[at + 1], '^(%d+)') or '0')
  if now - spoke > 60000 then call('HDEL', K_WAITING, silent[at]) end
end

local function expired(endpoint)
  return amnesty and {} or call('ZRANGEBYSCORE', slots_key(endpoint), '-inf', int(now), 'LIMIT', 0, 100)
end

for _, endpoint in ipairs(call('SMEMBERS', K_ENDPOINTS)) do
  for _, id in ipairs(expired(endpoint)) do
    local task = fields_of(id, 'status', 'x_lease', 'x_ep')
    call('ZREM', slots_key(endpoint), id)
    if task[2] and task[3] == endpoint then lost_lease(id, task[2]) end
    if task[1] == 'started' and task[3] == endpoint then
      call('ZREM', K_WIP, id .. ':' .. (task[2] or ''))
      lose(id, endpoint)
    else
      if task[1] == 'canceled' then call('HDEL', job_key(id), 'x_lease', 'x_ep') end
      freed = freed + 1
    end
  end
  if call('HGET', endpoint_key(endpoint), 'gone') == '1' and call('ZCARD', slots_key(endpoint)) == 0 then
    call('SREM', K_ENDPOINTS, endpoint)
    call('DEL', endpoint_key(endpoint))
  end
end
return {requeued, poisoned, freed}
