-- renew: the leases a process still holds run on.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, process, lease ms, k, then k endpoint ids it serves, n, then n times 3: id, lease, endpoint
-- Returns n words: "held" | "lost" | "canceled" | "already"
-- needs: contact, lease
-- An expired lease that nobody reaped yet is still its holder's, and is renewed.

local now = server_ms()
local lease_ms, k = tonumber(ARGV[4]), tonumber(ARGV[5])
call('PEXPIRE', P .. ':x:bell:' .. ARGV[3], 60000) -- a write that Redis allows when its memory is full opens the door
in_contact(now, lease_ms)
for i = 1, k do
  if known(ARGV[5 + i]) then call('HSET', endpoint_key(ARGV[5 + i]), 'seen', int(now)) end
end
local words_out, base = {}, 6 + k
for i = 1, tonumber(ARGV[base]) do
  local at = base + (i - 1) * 3
  local id, lease, endpoint = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local word = fence(id, lease)
  if word == 'held' or word == 'canceled' then
    call('ZADD', slots_key(endpoint), int(now + lease_ms), id)
    if word == 'held' then call('ZADD', K_WIP, seconds(now + lease_ms + 60000), id .. ':' .. lease) end
  end
  words_out[i] = word
end
return words_out
