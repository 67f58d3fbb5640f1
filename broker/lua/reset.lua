-- reset: open | half_open -> closed, by hand; a pause ends, health is checked anew.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, endpoint
-- Returns "done" | "unknown" (no such endpoint)
-- needs: breaker, select

if not known(ARGV[3]) then return 'unknown' end
write_when_full()
close_breaker(ARGV[3])
call('HDEL', endpoint_key(ARGV[3]), 'pause', 'healthy', 'checked', 'health_detail', 'rate_at', 'rate_n', 'rate_f', 'ramp',
  'ramp_ok')
announce(server_ms(), spill_after())
return 'done'
