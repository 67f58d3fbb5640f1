-- The amnesty of a pool, for verbs by which processes show that they live. After an outage every lease looks expired;
-- whoever lives must get to renew before anybody reaps.
-- The pool's hash has `contact`, when a process was last heard of, and `amnesty`, until when nothing is reaped. Each
-- process renews each third of a lease: when nobody did for half a lease, nobody could, and reaping rests for one lease
-- from the first contact after that.

-- A process is in contact. Returns until when nothing is to be reaped.
local function in_contact(now, lease_ms)
  local record = call('HMGET', K_POOL, 'contact', 'amnesty')
  local last, amnesty = tonumber(record[1] or ''), tonumber(record[2] or '') or 0
  -- Also when the clock was set back: no amnesty is longer.
  if not last or now - last > lease_ms / 2 or amnesty > now + lease_ms then amnesty = now + lease_ms end
  call('HSET', K_POOL, 'contact', int(now), 'amnesty', int(amnesty))
  return amnesty
end
