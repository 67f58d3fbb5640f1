-- cancel: queued | scheduled | started -> canceled. A running attempt's process is told to close its connection; its
-- slot stays taken until it did.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, result ttl ms, n, then n ids
-- Returns n words: "canceled" | "running" (canceled, and its attempt is told) | "settled" (it has an outcome) | "unknown" |
--         "stock" (a stock RQ worker runs it, which cannot be told and will write its own end)
-- needs: lists, outcome

local now = server_ms()
write_when_full()
local words_out = {}

local function cancel(id)
  local key = job_key(id)
  local task = fields_of(id, 'status', 'x_pri', 'x_req', 'x_excl', 'x_lease', 'x_ep', 'origin', 'x_out')
  local status = task[1]
  if not status or task[7] ~= pool then return 'unknown' end
  if task[8] or not (status == 'queued' or status == 'scheduled' or status == 'started') then return 'settled' end
  if status == 'started' and not task[5] then return 'stock' end
  if status == 'queued' then remove_waiting(variant_of(task[2] or nil, task[3] or nil, task[4] or nil), id) end
  if status == 'scheduled' then call('ZREM', K_SCHEDULED, id) end
  conclude(id, 'canceled', 'canceled', now, tonumber(ARGV[3]), {'x_why', 'canceled'})
  if status ~= 'started' then return 'canceled' end
  call('ZREM', K_WIP, id .. ':' .. task[5])
  call('HSET', key, 'x_lease', task[5], 'x_ep', task[6])
  local bell = P .. ':x:bell:' .. string.match(task[5], '^%d+%.%d+%.(.*)$')
  call('RPUSH', bell, 'cancel ' .. id .. ' ' .. task[5])
  call('PEXPIRE', bell, 60000)
  return 'running'
end

for i = 1, tonumber(ARGV[4]) do words_out[i] = cancel(ARGV[4 + i]) end
return words_out
