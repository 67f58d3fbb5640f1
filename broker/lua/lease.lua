-- Leases: who may settle, and what a settle writes first.
-- needs: outcome

-- `x_done` of a task that is ok: the lease's fence, which no other lease of the task has. Most leases of a call are the
-- same text.
local fences = {}
local function fence_of(lease)
  local text = fences[lease]
  if not text then
    text = string.match(lease, '^%d+')
    fences[lease] = text
  end
  return text
end

-- The fence. A lease is "<fence>.<epoch>.<process>"; only the holder of the current one may settle.
-- Returns 'held'; 'already' (one's own settle, repeated); 'canceled' (the outcome stands, the slot is to be freed);
-- 'lost' (somebody else's now, or gone). And the task, as read_ending has it.
local function fence(id, lease)
  local seen = fields_of(id, 'status', 'x_lease', 'x_born', 'x_run')
  if seen[1] == 'started' and seen[2] == lease and seen[3] and has_only(id, LEASED) then
    return 'held', {born = seen[3], run = seen[4]}
  end
  local task = read_ending(id)
  if task.lease == lease then
    if task.status == 'started' then return 'held', task end
    -- An RQ reader whose clock is ahead took the task for abandoned; the lease says otherwise.
    if task.status == 'failed' and not task.outcome then
      call('ZREM', K_FAILED, id)
      call('DEL', P .. ':results:' .. id)
      return 'held', task
    end
    if task.status == 'canceled' then return 'canceled', task end
  end
  if task.done and (task.done == lease or task.done == fence_of(lease)) then return 'already', task end
  return 'lost', task
end

-- What an attempt tells of its endpoint counts once, however often it is told: with its own settle, or, when its lease
-- was lost before, the first time. reap and scrub note which leases those are.
local LATE_KEPT = 8

local function lost_lease(id, lease)
  local late = words(fields_of(id, 'x_late')[1])
  late[#late + 1] = lease
  while #late > LATE_KEPT do table.remove(late, 1) end
  call('HSET', job_key(id), 'x_late', table.concat(late, ','))
end

local function is_news(id, lease, word)
  if word ~= 'lost' then return word ~= 'already' end
  local late, kept = words(fields_of(id, 'x_late')[1]), {}
  for _, other in ipairs(late) do
    if other ~= lease then kept[#kept + 1] = other end
  end
  if #kept == #late then return false end
  if #kept == 0 then call('HDEL', job_key(id), 'x_late')
  else call('HSET', job_key(id), 'x_late', table.concat(kept, ',')) end
  return true
end

-- What strangers wrote in the place of a count counts as nothing.
local function one_more(value) return math.floor(tonumber(value or '') or 0) + 1 end

-- A count in the task's hash goes up by one.
local function count(key, name)
  local number = one_more(call('HGET', key, name))
  call('HSET', key, name, int(number))
  return number
end

-- First writes of every settle: Redis allows them when its memory is full.
local function free_slot(id, lease, endpoint)
  call('ZREM', slots_key(endpoint), id)
  call('ZREM', K_WIP, id .. ':' .. lease)
end

local function free_canceled(id, lease, endpoint)
  free_slot(id, lease, endpoint)
  call('HDEL', job_key(id), 'x_lease', 'x_ep')
  call('HSET', job_key(id), 'x_done', lease)
end
