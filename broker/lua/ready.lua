-- Tasks that wait again, at once or later.
-- needs: lists

-- scheduled, running, settled -> queued: into the list its fields name. At the front it waits on as it did before. It waits
-- since `x_at`, or since it was born.
local function make_ready(id, now, front)
  local task = fields_of(id, 'x_pri', 'x_req', 'x_excl')
  if front then call('HSET', job_key(id), 'status', 'queued')
  else call('HSET', job_key(id), 'status', 'queued', 'x_at', int(now)) end
  push(variant_of(task[1] or nil, task[2] or nil, task[3] or nil), id, front)
end

local function schedule(id, due)
  call('HSET', job_key(id), 'status', 'scheduled')
  call('ZADD', K_SCHEDULED, seconds(due), id)
end

-- A suspect lost its lease so often that the next loss makes it poison. Suspects take turns, one a pool, so that one that
-- was only beside the poison is not beside it again. A turn ends with the attempt; in a list it lasts a minute, as what
-- nobody can take must not hold up the others.
local SUSPECT_WAITS = 60000
local NEXT_LOOKS, OTHERS_LOOK = 200, 2000 -- ms: the first of those who wait asks often, so that a turn begins soon

local function takes_turn(id, now)
  local other, at = string.match(call('HGET', K_POOL, 'suspect') or '', '^(%S+) (%d+)$')
  if other and other ~= id then
    local task = fields_of(other, 'status', 'x_sus')
    if task[2] and (task[1] == 'started' or task[1] == 'queued' and now - at < SUSPECT_WAITS) then return false end
  end
  call('HSET', K_POOL, 'suspect', id .. ' ' .. int(now))
  return true
end

-- scheduled -> queued, for what is due; at most 100. Returns how many. A suspect whose turn it is not waits on; one whose
-- turn it is goes to the head, so that its turn does not last as long as the list.
local function promote_due(now)
  local due = call('ZRANGEBYSCORE', K_SCHEDULED, '-inf', seconds(now), 'LIMIT', 0, 100)
  local again = NEXT_LOOKS
  for _, id in ipairs(due) do
    call('ZREM', K_SCHEDULED, id)
    local task = fields_of(id, 'status', 'x_sus')
    local suspect = task[2] and true or false
    if task[1] == 'scheduled' then
      if suspect and not takes_turn(id, now) then
        schedule(id, now + again)
        again = OTHERS_LOOK
      else make_ready(id, now, suspect) end
    end
  end
  return #due
end
