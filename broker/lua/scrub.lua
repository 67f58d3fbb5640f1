-- scrub: repairs what evictions, restores, bugs or strangers broke, a bounded piece a call; counts each repair.
-- KEYS[1] rq:x:pool:<pool> HASH (counters r_<repair>)
-- ARGV    prefix, pool, lease ms, dead letter ttl ms, keys cursor ("0" at first), lists cursor ("" at first)
-- Returns {keys cursor, lists cursor, repairs}; both cursors "" when the pass is done
-- any -> queued:      a task that no list, delay or lease has any more ("unlisted", "undelayed", "unowned", "abandoned",
--                     "confused")
-- any -> started:     a lease without its slot gets it back for one lease: renewed by its holder, or reaped ("slot")
-- any -> dead:        a task whose work is gone ("unreadable")
-- no change of state: entries of no waiting task ("ghost") and doubled ones ("double"), a list outside the index ("list"),
--                     deadlines ("deadline"), mirrors of leases that are no more ("wip"), what an RQ reader wrote of a
--                     task that had its outcome ("restated"), what registries of outcomes name and is no task any more
--                     ("gone")
-- needs: ready, outcome, select

local now = server_ms()
local lease_ms, dead_ttl = tonumber(ARGV[3]), tonumber(ARGV[4])
local keys_at, lists_at = ARGV[5], ARGV[6]
local KEYS_A_CALL, ENTRIES_A_CALL, SEARCHES_A_CALL = 200, 1000, 20
local repairs, searches, ready = 0, 0, false
write_when_full()

local function repaired(what)
  call('HINCRBY', K_POOL, 'r_' .. what, 1)
  repairs = repairs + 1
end

local function requeue(id, what)
  call('HDEL', job_key(id), 'x_lease', 'x_ep', 'x_run')
  make_ready(id, now)
  ready = true
  repaired(what)
end

local STATES = set_of({'queued', 'scheduled', 'started', 'finished', 'failed', 'canceled', 'deferred', 'stopped', 'created'})

-- Lists are first in, first out: what is younger than its list's head stands behind it. What is older was moved there
-- late, or is gone: a search tells, which reads the list, so a call makes few; the next pass makes more.
local function behind_head(id, key, task)
  local head = call('LINDEX', key, 0)
  if not head then return false end
  if call('TYPE', job_key(head)).ok ~= 'hash' then return false end
  local other = call('HMGET', job_key(head), 'x_at', 'enqueued_at', 'x_born')
  local at, head_at = tonumber(task.x_at or task.x_born or ''), tonumber(other[1] or other[3] or '')
  if at and head_at then return head_at <= at end
  -- plain: text by its producers' clocks, with more digits than ours
  return task.enqueued_at and other[2] and string.sub(other[2], 1, -2) <= string.sub(task.enqueued_at, 1, -2)
end

local function in_list(id, variant, task)
  local key = list_key(variant)
  if behind_head(id, key, task) or searches >= SEARCHES_A_CALL then return true end
  searches = searches + 1
  return call('LPOS', key, id) and true or false
end

local function taken_by_rq(id)
  if call('LPOS', K_QUEUE .. ':intermediate', id) then return true end
  return call('EXISTS', P .. ':executions:' .. id) == 1
end

local function check_queued(id, task)
  local variant = variant_of(task.x_pri, task.x_req, task.x_excl)
  if in_list(id, variant, task) then
    if variant ~= '' and call('SISMEMBER', K_LISTS, variant) == 0 then
      listed(variant)
      ready = true
      repaired('list')
    end
    return
  end
  -- A plain producer may name another list than the fields do; a claim would move it.
  if variant ~= '' and call('LPOS', K_QUEUE, id) then return end
  if not taken_by_rq(id) then requeue(id, 'unlisted') end
end

local function check_started(id, task)
  if not task.x_lease then
    -- A stock RQ worker has it while its execution's record lives.
    if call('EXISTS', P .. ':executions:' .. id) == 0 then requeue(id, 'abandoned') end
    return
  end
  local endpoint = task.x_ep
  if not endpoint or call('SISMEMBER', K_ENDPOINTS, endpoint) == 0 then
    requeue(id, 'unowned')
  elseif not call('ZSCORE', slots_key(endpoint), id) then
    call('ZADD', slots_key(endpoint), int(now + lease_ms), id)
    repaired('slot')
  end
end

local function check(id, task)
  local status = task.status
  if task.x_out then
    -- An RQ reader saw it run, and wrote that it failed after it had ended well.
    if task.x_out == 'ok' and status == 'failed' then
      call('HSET', job_key(id), 'status', 'finished')
      call('ZREM', K_FAILED, id)
      if task.x_born then call('DEL', P .. ':results:' .. id) end
      repaired('restated')
    end
    return
  end
  if not task.data and status ~= 'started' and (task.x_born or status == 'queued') then
    local why = 'its record was damaged: the work to do is gone'
    call('ZREM', K_SCHEDULED, id)
    conclude(id, 'dead', 'failed', now, dead_ttl, {'x_why', why, 'exc_info', why})
    repaired('unreadable')
    return
  end
  if task.x_dl and tonumber(task.x_dl) and not call('ZSCORE', K_DEADLINES, id) then
    call('ZADD', K_DEADLINES, task.x_dl, id)
    repaired('deadline')
  end
  if status == 'queued' then check_queued(id, task)
  elseif status == 'scheduled' then
    if not call('ZSCORE', K_SCHEDULED, id) then requeue(id, 'undelayed') end
  elseif status == 'started' then check_started(id, task)
  elseif not STATES[status or ''] and task.data then
    requeue(id, 'confused')
  elseif status == 'failed' and task.x_lease then
    -- RQ's cleaning by a clock that is ahead declared it abandoned. Its holder may still settle; else it runs again.
    local held = task.x_lease and task.x_ep and call('ZSCORE', slots_key(task.x_ep), id)
    if not held then
      call('ZREM', K_FAILED, id)
      call('DEL', P .. ':results:' .. id)
      requeue(id, 'abandoned')
    end
  end
end

local FIELDS = {'origin', 'status', 'data', 'x_out', 'x_pri', 'x_req', 'x_excl', 'x_at', 'x_lease', 'x_ep', 'x_dl', 'x_born',
  'enqueued_at'}

local function check_keys()
  local page = call('SCAN', keys_at, 'MATCH', P .. ':job:*', 'COUNT', KEYS_A_CALL, 'TYPE', 'hash')
  for _, key in ipairs(page[2]) do
    local values = call('HMGET', key, unpack(FIELDS))
    if values[1] == pool then
      local task = {}
      for at, name in ipairs(FIELDS) do task[name] = values[at] or nil end
      check(string.sub(key, #P + 6), task)
    end
  end
  return page[1] == '0' and '' or page[1]
end

-- A page of one list: entries that no waiting task has, and second ones, become '' and leave together: one pass.
local function check_page(variant, from)
  local key = list_key(variant)
  local entries = call('LRANGE', key, from, from + ENTRIES_A_CALL - 1)
  local seen, dead = {}, false
  for at, id in ipairs(entries) do
    local status = redis.pcall('HGET', job_key(id), 'status')
    local what = status ~= 'queued' and 'ghost' or seen[id] and 'double' or nil
    seen[id] = true
    if what then
      call('LSET', key, from + at - 1, '')
      dead = true
      if not ghost_gone(variant) then repaired(what) end -- a cancel left it, and said so
    end
  end
  local left = #entries
  if dead then left = left - call('LREM', key, 0, '') end
  if call('LLEN', key) == 0 then unlisted(variant) end
  if from == 0 and #entries < ENTRIES_A_CALL then call('HDEL', K_GHOSTS, variant) end -- the whole list was seen
  return #entries == ENTRIES_A_CALL and from + left or nil
end

-- A page of a registry of outcomes: ids whose hash was deleted or became another type. A hash expires with its entry, so
-- what is about to go by itself is left alone.
local function check_registry(key, from)
  local entries = call('ZRANGE', key, from, from + ENTRIES_A_CALL - 1, 'WITHSCORES')
  local seen, soon = #entries / 2, (now + 1000) / 1000
  local left = seen
  for at = 1, #entries, 2 do
    local id, score = entries[at], entries[at + 1]
    if call('TYPE', job_key(id)).ok ~= 'hash' and (score == 'inf' or tonumber(score) > soon) then
      call('ZREM', key, id)
      repaired('gone')
      left = left - 1
    end
  end
  return seen == ENTRIES_A_CALL and from + left or nil
end

-- cursor: "outcomes <which> <entries looked at>", after the lists
local OUTCOMES = {K_FAILED, K_CANCELED, K_FINISHED}
local function check_outcomes(which, from)
  local next_from = check_registry(OUTCOMES[which], from)
  if next_from then return 'outcomes ' .. int(which) .. ' ' .. int(next_from) end
  return which < #OUTCOMES and 'outcomes ' .. int(which + 1) .. ' 0' or ''
end

-- cursor: "<variant> <entries looked at>"
local function check_lists()
  local which, at = string.match(lists_at, '^outcomes (%d) (%d+)$')
  if which then return check_outcomes(tonumber(which), tonumber(at)) end
  local variants = call('SMEMBERS', K_LISTS)
  variants[#variants + 1] = ''
  table.sort(variants)
  local variant, from = string.match(lists_at, '^(%S*) (%d+)$')
  variant, from = variant or '', tonumber(from or '0')
  local next_from = check_page(variant, from)
  if next_from then return variant .. ' ' .. int(next_from) end
  for _, other in ipairs(variants) do
    if other > variant then return other .. ' 0' end
  end
  return 'outcomes 1 0'
end

local function check_wip()
  for _, member in ipairs(call('ZRANGEBYSCORE', K_WIP, '-inf', seconds(now), 'LIMIT', 0, 100)) do
    local id, lease = string.match(member, '^(.*):(%d+%.%d+%.[^:]*)$')
    if id and redis.pcall('HGET', job_key(id), 'x_lease') ~= lease then
      call('ZREM', K_WIP, member)
      repaired('wip')
    end
  end
end

if keys_at == '0' and lists_at == '' then check_wip() end
local next_keys = keys_at ~= '' and check_keys() or ''
local next_lists = (lists_at ~= '' or keys_at == '0') and check_lists() or ''
if ready then announce(now, spill_after()) end
return {next_keys, next_lists, repairs}
