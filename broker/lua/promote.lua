-- promote: scheduled -> queued, for what is due; at most 100 a call.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool
-- Returns how many were due; 100 means: call again.
-- needs: ready, select

local now = server_ms()
local count = promote_due(now)
if count > 0 then announce(now, spill_after()) end
return count
