-- retire: a pool that nobody serves and that holds no task leaves the index, with its counters and settings.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, away ms: for so long no process was heard of; one whose endpoints a reload took away: a minute
-- Returns "retired" | "served" (by a process, not long ago) | "holds" (tasks, results, or endpoints added at run time)
-- Who serves it again registers it again.

local now, away = server_ms(), tonumber(ARGV[3])
local endpoints, configured = call('SMEMBERS', K_ENDPOINTS), false
for _, endpoint in ipairs(endpoints) do
  if call('EXISTS', slots_key(endpoint)) == 1 then return 'holds' end
  configured = configured or call('HGET', endpoint_key(endpoint), 'gone') ~= '1'
end
if not configured then away = math.min(away, 60000) end

local function heard_of(moment) return now - (tonumber(moment or '') or 0) < away end

if heard_of(call('HGET', K_POOL, 'contact')) then return 'served' end
for _, text in ipairs(call('HVALS', K_WAITING)) do
  if heard_of(string.match(text, '^(%d+)')) then return 'served' end
end
for _, endpoint in ipairs(endpoints) do
  if heard_of(call('HGET', endpoint_key(endpoint), 'seen')) then return 'served' end
end
if call('EXISTS', K_QUEUE, K_LISTS, K_SCHEDULED, K_WIP, P .. ':x:registered:' .. pool) > 0 then return 'holds' end
for _, registry in ipairs({K_FINISHED, K_FAILED, K_CANCELED}) do
  if call('ZCOUNT', registry, seconds(now), '+inf') > 0 then return 'holds' end
end

for _, endpoint in ipairs(endpoints) do call('DEL', endpoint_key(endpoint)) end
call('DEL', K_POOL, K_ENDPOINTS, K_WAITING, K_DEADLINES, K_GHOSTS, K_FINISHED, K_FAILED, K_CANCELED)
call('SREM', P .. ':x:pools', pool)
call('SREM', K_QUEUES, K_QUEUE)
return 'retired'
