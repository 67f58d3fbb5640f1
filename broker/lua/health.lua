-- health: the result of a check. healthy <-> unhealthy; the breaker is untouched.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, endpoint, ok 0|1, detail (one line)
-- Returns "recovered" | "failed" (just now) | "down" (at its first check) | "same" | "unknown" (no such endpoint)
-- needs: select

local endpoint, ok, detail = ARGV[3], ARGV[4] == '1', ARGV[5]
if not known(endpoint) then return 'unknown' end
local now, key = server_ms(), endpoint_key(endpoint)
local was = call('HGET', key, 'healthy')
write_when_full()
call('HSET', key, 'healthy', ok and '1' or '0', 'checked', int(now), 'health_detail', detail)
if ok then
  call('HSET', key, 'health_fails', 0)
  if was == '0' then
    if slow_start() then call('HSET', key, 'ramp', 1, 'ramp_ok', 0) end
    announce(now, spill_after())
    return 'recovered'
  end
  if not was then announce(now, spill_after()) end
  return 'same'
end
call('HINCRBY', key, 'health_fails', 1)
if not was then return 'down' end
return was == '0' and 'same' or 'failed'
