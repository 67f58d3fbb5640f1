-- expire: queued | scheduled, deadline passed by the server's time -> expired. At most 100 a call.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, result ttl ms
-- Returns how many deadlines were looked at; 100 means: call again.
-- A running task is left to its worker, whose attempt ends with the deadline; if that died, reap puts it back and a
-- later sweep finds it here.
-- needs: lists, outcome

local now = server_ms()
write_when_full()
local ids = call('ZRANGEBYSCORE', K_DEADLINES, '-inf', int(now), 'LIMIT', 0, 100)
for _, id in ipairs(ids) do
  local task = fields_of(id, 'status', 'x_pri', 'x_req', 'x_excl')
  local status = task[1]
  if status == 'started' then
    call('ZADD', K_DEADLINES, int(now + 5000), id)
  else
    call('ZREM', K_DEADLINES, id)
    if status == 'queued' or status == 'scheduled' then
      if status == 'scheduled' then call('ZREM', K_SCHEDULED, id)
      else remove_waiting(variant_of(task[2] or nil, task[3] or nil, task[4] or nil), id) end
      expire_waiting(id, now, tonumber(ARGV[3]))
    end
  end
end
for _, registry in ipairs({K_FINISHED, K_FAILED, K_CANCELED}) do
  call('ZREMRANGEBYSCORE', registry, '-inf', seconds(now))
end
return #ids
