-- ticket: who does a periodic duty until the ticket runs out. Works when Redis' memory is full.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, duty, process, ttl ms, again 0|1 (1: its holder gets it again, for another ttl)
-- Returns 1 if the process has it, else 0

write_when_full()
local key = P .. ':x:ticket:' .. pool .. ':' .. ARGV[3]
if call('SET', key, ARGV[4], 'NX', 'PX', ARGV[5]) then return 1 end
if ARGV[6] == '1' and call('GET', key) == ARGV[4] then
  call('PEXPIRE', key, ARGV[5])
  return 1
end
return 0
