-- restore: endpoints added at run time, where Redis forgot that they were added or removed, as a worker remembers them.
-- KEYS[1] rq:x:pool:<pool> HASH; its field `revision` counts what was added and removed
-- ARGV    prefix, pool, the revision that the worker knows, n, then n times 2: endpoint, JSON; then endpoints removed
-- Returns {revision, endpoints that are there, those put back or taken out}

local known_revision, n = tonumber(ARGV[3]), tonumber(ARGV[4])
local key = P .. ':x:registered:' .. pool
local revision = tonumber(string.match(call('HGET', K_POOL, 'revision') or '', '^%-?%d+$') or '0')
local changed = {}
if revision <= known_revision then
  write_when_full()
  for at = 5, 3 + n * 2, 2 do
    if call('HGET', key, ARGV[at]) ~= ARGV[at + 1] then
      call('HSET', key, ARGV[at], ARGV[at + 1])
      changed[#changed + 1] = ARGV[at]
    end
  end
  for at = 5 + n * 2, #ARGV do
    if call('HDEL', key, ARGV[at]) == 1 then changed[#changed + 1] = ARGV[at] end
  end
  -- Counted on, so that it is news to all. What else was added after Redis had forgotten stays.
  if revision < known_revision or #changed > 0 then
    revision = known_revision + 1
    call('HSET', K_POOL, 'revision', int(revision))
  end
end
return {revision, call('HLEN', key), changed}
