-- drain: an endpoint takes no more tasks, what runs finishes; or takes them again.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, endpoint, on 0|1
-- Returns "done" | "unknown" (no such endpoint)
-- needs: select

if not known(ARGV[3]) then return 'unknown' end
write_when_full()
if ARGV[4] == '1' then
  call('HSET', endpoint_key(ARGV[3]), 'drain', '1')
else
  call('HDEL', endpoint_key(ARGV[3]), 'drain')
end
announce(server_ms(), spill_after())
return 'done'
