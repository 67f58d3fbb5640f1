-- What every script shares. It stands before each verb; a verb starts where this ends.
-- KEYS[1] rq:x:pool:<pool>   ARGV[1] key prefix   ARGV[2] pool   then the verb's own.
-- Times are whole milliseconds by the server's clock, written with %d: tostring() loses digits.

local P, pool = ARGV[1], ARGV[2]
local call = redis.call
local K_POOL = P .. ':x:pool:' .. pool
local K_QUEUE = P .. ':queue:' .. pool
local K_QUEUES = P .. ':queues'
local K_LISTS = P .. ':x:lists:' .. pool
local K_ENDPOINTS = P .. ':x:endpoints:' .. pool
local K_WAITING = P .. ':x:waiting:' .. pool
local K_DEADLINES = P .. ':x:deadlines:' .. pool
local K_GHOSTS = P .. ':x:ghosts:' .. pool
local K_WIP = P .. ':wip:' .. pool
local K_SCHEDULED = P .. ':scheduled:' .. pool
local K_FINISHED = P .. ':finished:' .. pool
local K_FAILED = P .. ':failed:' .. pool
local K_CANCELED = P .. ':canceled:' .. pool

local function job_key(id) return P .. ':job:' .. id end
-- Fields of a task. A key of its name that is no hash, which a stranger must have put there, has none.
local function fields_of(id, ...)
  local values = redis.pcall('HMGET', job_key(id), ...)
  return values.err and {} or values
end

-- To count a task's fields is cheaper than to look for a dozen that are not there: as enqueue wrote it, with no options,
-- it has PLAIN of them, which nobody takes away; in its first lease it has LEASED.
local PLAIN, LEASED = 10, 16

local slots_keys = {}
local function slots_key(endpoint)
  local key = slots_keys[endpoint]
  if not key then
    key = P .. ':x:slots:' .. pool .. ':' .. endpoint
    slots_keys[endpoint] = key
  end
  return key
end
local function endpoint_key(endpoint) return P .. ':x:endpoint:' .. pool .. ':' .. endpoint end
-- An endpoint that left the configuration has no hash; a late call about it must not bring one back.
local function known(endpoint) return call('EXISTS', endpoint_key(endpoint)) == 1 end

-- Redis out of memory refuses a script whose first write may grow; after this one all are allowed, so that consuming
-- goes on, and frees memory, while enqueue is refused.
local function write_when_full() call('PERSIST', K_POOL) end

-- Whether an endpoint that recovers is given its slots slowly.
local function slow_start() return call('HGET', K_POOL, 'slow_start') == '1' end

local IDEM_TTL = 14 * 86400000 -- of the idempotency key of a task without outcome

-- Written once: a call writes the same few numbers for each of its tasks.
local written = {}
local function int(number)
  local text = written[number]
  if not text then
    text = string.format('%d', number)
    written[number] = text
  end
  return text
end

local function server_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- RQ scores its registries in Unix seconds.
local scored = {}
local function seconds(ms)
  local text = scored[ms]
  if not text then
    text = string.format('%.3f', ms / 1000)
    scored[ms] = text
  end
  return text
end

-- RQ's text of a time, by Howard Hinnant's days-to-date algorithm: a script has no calendar.
local function date_text(ms)
  local floor, days = math.floor, math.floor(ms / 86400000)
  local left, shifted = ms - days * 86400000, days + 719468
  local era = floor(shifted / 146097)
  local of_era = shifted - era * 146097
  local year = floor((of_era - floor(of_era / 1460) + floor(of_era / 36524) - floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + floor(year / 4) - floor(year / 100))
  local month = floor((5 * of_year + 2) / 153)
  local day = of_year - floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  year = year + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%03d000Z', year, month, day, floor(left / 3600000),
    floor(left / 60000) % 60, floor(left / 1000) % 60, left % 1000)
end

local function words(text)
  local found = {}
  for word in string.gmatch(text or '', '[^,]+') do found[#found + 1] = word end
  return found
end

local function set_of(list)
  local set = {}
  for _, item in ipairs(list) do set[item] = true end
  return set
end

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

-- scheduled, running, settled -> queued: into the list its fields name. At the front it waits on as it did before.
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
  for _, id in ipairs(due) do
    call('ZREM', K_SCHEDULED, id)
    local task = fields_of(id, 'status', 'x_sus')
    local suspect = task[2] and true or false
    if task[1] == 'scheduled' then
      if suspect and not takes_turn(id, now) then schedule(id, now + 2000)
      else make_ready(id, now, suspect) end
    end
  end
  return #due
end

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

-- What an outcome depends on.
local function read_ending(id)
  local found = fields_of(id, 'status', 'x_lease', 'x_done', 'x_out', 'x_try', 'x_dl', 'x_reply', 'x_idem', 'x_born',
    'result_ttl', 'failure_ttl', 'x_run')
  return {
    status = found[1], lease = found[2], done = found[3], outcome = found[4], try = found[5], deadline = found[6],
    reply = found[7], idem = found[8], born = found[9], result_ttl = found[10], failure_ttl = found[11], run = found[12],
  }
end

local REGISTRIES = {ok = K_FINISHED, dead = K_FAILED, poison = K_FAILED, canceled = K_CANCELED}

-- any -> an outcome. Fields is a flat list for the hash; task is what read_ending gives. The caller has freed the slot
-- already, and writes the sums. ttl in milliseconds; a task of a plain RQ producer keeps the TTL its producer asked for.
-- Returns how long it ran, ms.
local function conclude_in(sums, id, task, outcome, status, now, ttl, fields)
  local key = job_key(id)
  if task.deadline then call('ZREM', K_DEADLINES, id) end
  if not task.born then
    local own = tonumber((outcome == 'ok' and task.result_ttl or outcome ~= 'ok' and task.failure_ttl) or '')
    if own and own ~= 0 then ttl = own * 1000 end
    if own == 0 and outcome == 'ok' then ttl = 1000 end
  end
  local n = #fields
  fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'status', status, 'x_out', outcome
  fields[n + 5], fields[n + 6] = 'x_end', int(now)
  call('HDEL', key, 'x_lease', 'x_ep', 'x_run')
  call('HSET', key, unpack(fields))
  if ttl > 0 then call('PEXPIRE', key, int(ttl)) else call('PERSIST', key) end
  if REGISTRIES[outcome] then member(sums, REGISTRIES[outcome], ttl > 0 and seconds(now + ttl) or '+inf', id) end
  if task.reply then
    for _, name in ipairs(words(task.reply)) do
      local ids = sums.replies[name] or {}
      sums.replies[name] = ids
      ids[#ids + 1] = id
    end
  end
  if task.idem and task.idem ~= '' then
    call('PEXPIRE', P .. ':x:idem:' .. pool .. ':' .. task.idem, int(ttl > 0 and ttl or 86400000))
  end
  sums.counts['n_' .. outcome] = (sums.counts['n_' .. outcome] or 0) + 1
  return now - (tonumber(task.run or '') or now)
end

-- The same for one task.
local function conclude(id, outcome, status, now, ttl, fields)
  local sums = new_sums()
  local ran = conclude_in(sums, id, read_ending(id), outcome, status, now, ttl, fields)
  write_sums(sums)
  return ran
end

-- A task that waits again holds its idempotency key as a new one does, unless a later task has taken it.
local function hold_idem(id)
  local task = fields_of(id, 'x_idem', 'x_dig')
  if not task[1] then return end
  local key, mine = P .. ':x:idem:' .. pool .. ':' .. task[1], id .. ' ' .. (task[2] or '')
  local found = call('GET', key)
  if not found or found == mine then call('SET', key, mine, 'PX', IDEM_TTL) end
end

-- queued, scheduled -> expired.
local function expire_waiting(id, now, ttl)
  local why = 'expired: its deadline passed while it waited'
  conclude(id, 'expired', 'failed', now, ttl, {'x_why', why, 'exc_info', why})
end

-- The fence. A lease is "<fence>.<epoch>.<process>"; only the holder of the current one may settle.
-- Returns 'held'; 'already' (one's own settle, repeated); 'canceled' (the outcome stands, the slot is to be freed);
-- 'lost' (somebody else's now, or gone). And the task, as read_ending has it.
local function fence(id, lease)
  local seen = fields_of(id, 'status', 'x_lease', 'x_born', 'x_run')
  if seen[1] == 'started' and seen[2] == lease and seen[3] and call('HLEN', job_key(id)) == LEASED then
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
  if task.done == lease then return 'already', task end
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
