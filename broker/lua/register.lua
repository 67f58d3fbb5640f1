-- register: the pool's policies and endpoints, as a worker's configuration has them. Writes what differs: whoever serves
-- calls it again and again, and so repairs what Redis forgot. Running state is kept, and what operators set (`drain`).
-- KEYS[1] rq:x:pool:<pool> HASH; its field `configured`, "<since> <digest>", says which configuration is in force
-- ARGV    prefix, pool,
--         since: ms, when the caller's configuration came into force; 0 for a new one, which does now
--         digest of the configuration ("-": it has left this pool),
--         revision of the endpoints added at run time that are among these ("": whatever it is),
--         m, then m pairs (policy field, value), n, then n times 8:
--         endpoint, priority, cap, on 0|1, capabilities (comma separated), floor, ceiling (0 0: a fixed cap),
--         drained 0|1: what an endpoint that Redis forgot is to be
-- Returns {"done", since, fields that differed, {endpoints gone from the configuration}, {drained endpoints}}
--         {"newer"}: a newer configuration is in force, of another worker; nothing is written
--         {"revised"}: endpoints were added or removed since; nothing is written
-- needs: select

local now = server_ms()
local given, digest, revision, m = tonumber(ARGV[3]), ARGV[4], ARGV[5], tonumber(ARGV[6])
local differed = 0
write_when_full()

local since = given
local in_force, theirs = string.match(call('HGET', K_POOL, 'configured') or '', '^(%d+) (.*)$')
in_force = tonumber(in_force or '0')
local there = string.match(call('HGET', K_POOL, 'revision') or '', '^%-?%d+$') or '0'
if revision ~= '' and there ~= revision then return {'revised'} end
if theirs == digest then
  since = math.max(since, in_force)
elseif since > 0 and in_force > since and theirs ~= '-' then
  return {'newer'}
elseif since == 0 or theirs == '-' then
  since = math.max(now, in_force + 1)
end
if since == 0 then since = now end

-- Fields of a hash, as a list of names and values.
local function keep(key, wanted)
  local names = {}
  for i = 1, #wanted, 2 do names[#names + 1] = wanted[i] end
  local found, differs = call('HMGET', key, unpack(names)), {}
  for i, name in ipairs(names) do
    local value = wanted[i * 2]
    if found[i] ~= value then
      differs[#differs + 1] = name
      differs[#differs + 1] = value
    end
  end
  if #differs > 0 then call('HSET', key, unpack(differs)) end
  differed = differed + #differs / 2
end

local function keep_member(key, member) differed = differed + call('SADD', key, member) end

-- Whether there is such a key; a stranger's of another type makes way.
local function has(key, kind)
  local there = call('TYPE', key).ok
  if there ~= kind and there ~= 'none' then call('DEL', key) end
  return there == kind
end

local base = 7 + m * 2
local settings = {unpack(ARGV, 7, base - 1)}
settings[#settings + 1] = 'configured'
settings[#settings + 1] = int(since) .. ' ' .. digest
keep(K_POOL, settings)
keep_member(P .. ':x:pools', pool)
keep_member(K_QUEUES, K_QUEUE)
has(K_ENDPOINTS, 'set')

local kept, drained = {}, {}
for i = 1, tonumber(ARGV[base]) do
  local id, priority, cap, on, capabilities, floor, ceiling, rests = unpack(ARGV, base + i * 8 - 7, base + i * 8)
  local key = endpoint_key(id)
  kept[id] = true
  keep_member(K_ENDPOINTS, id)
  if not has(key, 'hash') then
    call('HSET', key, 'seen', int(now))
    if rests == '1' then call('HSET', key, 'drain', '1') end
  elseif given == 0 then
    call('HSET', key, 'seen', int(now))
  end
  local fields = {'priority', priority, 'on', on, 'capabilities', capabilities, 'gone', '0'}
  if ceiling == '0' then
    keep(key, {'cap', cap, unpack(fields)})
    -- All that was measured too: `auto` again begins anew, not with a measurement that began back then.
    call('HDEL', key, 'auto', 'floor', 'ceiling', 'a_step', 'a_phase', 'a_n', 'a_at', 'a_low', 'a_rate', 'a_slots',
      'a_rounds', 'a_limit', 'a_cut')
  else
    -- What `auto` has found is kept.
    local found = call('HGET', key, 'auto') == '1' and tonumber(call('HGET', key, 'cap') or '') or tonumber(cap)
    found = math.max(tonumber(floor), math.min(tonumber(ceiling), found))
    keep(key, {'auto', '1', 'floor', floor, 'ceiling', ceiling, 'cap', int(found), unpack(fields)})
  end
  if call('HEXISTS', key, 'drain') == 1 then drained[#drained + 1] = id end
end

local gone = {}
for _, id in ipairs(call('SMEMBERS', K_ENDPOINTS)) do
  if not kept[id] then
    gone[#gone + 1] = id
    keep(endpoint_key(id), {'on', '0', 'gone', '1'}) -- reap removes it when its last slot is free
    if call('ZCARD', slots_key(id)) == 0 then
      call('SREM', K_ENDPOINTS, id)
      call('DEL', endpoint_key(id))
    end
  end
end
if given == 0 or differed > 0 then announce(now, spill_after()) end
return {'done', since, differed, gone, drained}
