-- The lists of waiting tasks, and the index of those that hold something.

-- The list a task waits in: all endpoints that may take a task of one list are the same endpoints.
local function variant_of(priority, requires, excluded)
  priority = priority or 'normal'
  requires, excluded = requires or '', excluded or ''
  if requires == '' and excluded == '' then
    return priority == 'normal' and '' or priority
  end
  local variant = priority
  if requires ~= '' then variant = variant .. '+' .. requires end
  if excluded ~= '' then variant = variant .. '!' .. excluded end
  return variant
end

local function list_key(variant)
  return variant == '' and K_QUEUE or (K_QUEUE .. ':' .. variant)
end

-- The index and RQ's set of queues name a list exactly while it holds something.
local function listed(variant)
  if variant ~= '' then
    call('SADD', K_LISTS, variant)
    call('SADD', K_QUEUES, list_key(variant))
  end
end

local function unlisted(variant)
  if variant ~= '' then
    call('SREM', K_LISTS, variant)
    call('SREM', K_QUEUES, list_key(variant))
  end
end

local function push(variant, id, front)
  local length = call(front and 'LPUSH' or 'RPUSH', list_key(variant), id)
  if length == 1 then listed(variant) end
end

-- An entry of no waiting task that is left in its list, and one that is gone. They are counted, as they are no depth.
local function ghost_left(variant) call('HINCRBY', K_GHOSTS, variant, 1) end

local function ghost_gone(variant)
  if call('HEXISTS', K_GHOSTS, variant) == 0 then return false end
  if call('HINCRBY', K_GHOSTS, variant, -1) <= 0 then call('HDEL', K_GHOSTS, variant) end
  return true
end

-- Long lists keep the entry: whoever pops it drops it, and scrub sweeps what nobody pops.
local function remove_waiting(variant, id)
  local key = list_key(variant)
  local length = call('LLEN', key)
  if length > 2000 then return ghost_left(variant) end
  if call('LREM', key, 1, id) == 1 and length == 1 then unlisted(variant) end
end
