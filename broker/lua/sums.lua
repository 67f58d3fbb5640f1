-- What a verb writes once for all its tasks: members of registries, ids for reply lists, counts. A call costs the server
-- more than what it writes.
local function new_sums() return {members = {}, replies = {}, counts = {}, keys = {}} end

local function member(sums, key, score, name)
  local list = sums.members[key]
  if not list then
    list = {}
    sums.members[key] = list
    sums.keys[#sums.keys + 1] = key
  end
  list[#list + 1] = score
  list[#list + 1] = name
end

-- A table for each UNPACKED words: Lua's stack is bounded.
local UNPACKED = 4000
local function call_with(command, key, list)
  if #list <= UNPACKED then return call(command, key, unpack(list)) end
  for at = 1, #list, UNPACKED do call(command, key, unpack(list, at, math.min(at + UNPACKED - 1, #list))) end
end

local function write_sums(sums)
  for _, key in ipairs(sums.keys) do call_with('ZADD', key, sums.members[key]) end
  for name, count in pairs(sums.counts) do call('HINCRBY', K_POOL, name, count) end
  for name, ids in pairs(sums.replies) do
    local reply = P .. ':x:reply:' .. name
    call_with('RPUSH', reply, ids)
    call('PEXPIRE', reply, 86400000)
  end
end
