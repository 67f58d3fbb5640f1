-- claim: queued -> started, for all endpoints of one process in one call, by the rule in select.lua.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, process, lease ms, most tasks, k, then k times: endpoint, room, held
--         room: how many more this process could run on it; held: how many it runs now
--         and, if the reply of an earlier claim may have been lost: m, then m times: id, lease of what it knows to hold.
--         What it holds without knowing is given to it again, first
-- Returns {wake ms or -1, left, tasks, endpoints to check first, now ms}
--         wake: claim again by then, even if no bell rings; left: tasks still waiting; tasks, three times as many values:
--         id, data, and in one text "<endpoint> <attempts so far> <max attempts, 0 the pool's> <deadline ms, 0 none>
--         <born ms> <1 from a plain RQ producer, else 0> <lost leases so far> <lease>"
-- Drops what died while it waited; moves what stands in a wrong list.
-- needs: select, sums
-- rarely: idem, outcome, ready

local now = server_ms()
local process, lease_ms, most = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local started_at = date_text(now)
local rooms, held, mine, with_room = {}, {}, {}, {}
for i = 1, tonumber(ARGV[6]) do
  local at = 6 + (i - 1) * 3
  local id = ARGV[at + 1]
  mine[#mine + 1] = id
  rooms[id], held[id] = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  if rooms[id] > 0 then with_room[#with_room + 1] = id end
end

local unknown = {} -- leases of this process that it does not know of
local function look_for_lost(at)
  local knows = {}
  for i = 1, tonumber(ARGV[at]) do knows[ARGV[at + i * 2 - 1] .. ' ' .. ARGV[at + i * 2]] = true end
  for _, endpoint in ipairs(mine) do
    for _, id in ipairs(call('ZRANGE', slots_key(endpoint), 0, -1)) do
      local task = fields_of(id, 'status', 'x_lease', 'x_ep', 'data')
      local lease = task[2]
      if task[1] == 'started' and lease and task[3] == endpoint and task[4] and not knows[id .. ' ' .. lease]
        and string.match(lease, '^%d+%.%d+%.(.*)$') == process and rooms[endpoint] > 0 and #unknown < most then
        unknown[#unknown + 1] = {id, endpoint, lease}
        rooms[endpoint], held[endpoint] = rooms[endpoint] - 1, held[endpoint] + 1
      end
    end
  end
end
if ARGV[7 + #mine * 3] then look_for_lost(7 + #mine * 3) end

call('LREM', P .. ':x:bell:' .. process, 0, 'work') -- messages about cancels stay
local first_due -- ms
local function look_at_scheduled()
  local entry = call('ZRANGE', K_SCHEDULED, 0, 0, 'WITHSCORES')
  first_due = entry[2] and math.ceil(tonumber(entry[2]) * 1000 - 0.5)
end
look_at_scheduled()
if first_due and first_due <= now then
  rarely().promote_due(now)
  look_at_scheduled()
end
local policy = call('HMGET', K_POOL, 'spill_after', 'check_after')
local spill = spill_of(policy[1])
local view = read_view(now, spill, process, rooms, tonumber(policy[2] or ''))
local classes = read_classes(view)
local turn = #classes > 0 and call('HINCRBY', K_POOL, 'turn', 1) or 0
sort_classes(classes, falls(turn, 1 / 8))

local took = {} -- endpoint -> tasks started on it in this call

-- With siblings listening on the same endpoint a process leaves them their share of its slots.
local function own_limit(endpoint)
  local siblings = 0
  for _, other in ipairs(view.waiting) do
    if other.trusted and (other.rooms[endpoint.id] or 0) > 0 then siblings = siblings + 1 end
  end
  local taken = took[endpoint.id] or 0
  local limit = math.min(rooms[endpoint.id], endpoint.free - taken)
  if siblings > 0 then
    limit = math.min(limit, math.ceil(endpoint.cap / (siblings + 1)) - held[endpoint.id] - taken)
  end
  return math.max(0, limit)
end

-- Lower priorities get a fixed small share: of 64 pops four go to the next one down and one to the last.
local pops = 0
local function next_list(class)
  local lists = {}
  for _, list in ipairs(class.lists) do
    if list.length > 0 then lists[#lists + 1] = list end
  end
  if #lists < 2 then return lists[1], true end
  pops = pops + 1
  local beat = turn * 7 + pops
  if falls(beat, 1 / 64) then return lists[#lists], false end
  if falls(beat, 5 / 64) then return lists[2], false end
  return lists[1], false
end

local FIELDS_OF_TASK = {'status', 'data', 'x_try', 'x_max', 'x_dl', 'x_born', 'x_pri', 'x_req', 'x_excl', 'x_out',
  'x_del', 'x_fence', 'x_done'}

local moved = false

-- A task that stood in a list: {fields} if it may start now.
local function admit(id, variant)
  local seen = fields_of(id, 'status', 'data', 'x_born')
  if seen[1] == 'queued' and seen[2] and seen[3] and has_only(id, PLAIN) then
    return {seen[1], seen[2], nil, nil, nil, seen[3]}
  end
  local task = fields_of(id, unpack(FIELDS_OF_TASK))
  if task[1] ~= 'queued' or not task[2] then
    ghost_gone(variant)
    return nil
  end
  if not task[10] and (tonumber(task[5] or '') or now + 1) <= now then
    rarely().expire_waiting(id, now, tonumber(call('HGET', K_POOL, 'result_ttl') or '') or 86400000)
    return nil
  end
  if task[10] then
    -- RQ's own requeue put a dead letter back: a redrive.
    call('HDEL', job_key(id), 'x_out', 'x_try', 'x_excl', 'x_del', 'x_sus', 'x_dl', 'x_why', 'x_ans',
      'ended_at', 'exc_info')
    call('PERSIST', job_key(id))
    rarely().hold_idem(id)
    task[3], task[5], task[9], task[11] = nil, nil, nil, nil
  end
  local proper = variant_of(task[7] or nil, task[8] or nil, task[9] or nil)
  if proper ~= variant and (task[8] or task[9]) then
    push(proper, id)
    moved = true
    return nil
  end
  return task
end

-- As text: a Lua number would lose its digits on the way. What strangers wrote counts as nothing.
local function whole(text) return int(whole_of(text)) end

local tasks, given = {}, 0
local sums = new_sums()
local NOW, EXPIRES, SHOWN = int(now), int(now + lease_ms), seconds(now + lease_ms + 60000)
local function hand(id, task, endpoint, lease)
  member(sums, slots_key(endpoint), EXPIRES, id)
  member(sums, K_WIP, SHOWN, id .. ':' .. lease)
  tasks[given * 3 + 1], tasks[given * 3 + 2] = id, task[2]
  tasks[given * 3 + 3] = endpoint .. ' ' .. whole(task[3]) .. ' ' .. whole(task[4]) .. ' ' .. whole(task[5]) .. ' '
    .. whole(task[6]) .. (task[6] and ' 0 ' or ' 1 ') .. whole(task[11]) .. ' ' .. lease
  given = given + 1
end

local function start(id, task, endpoint)
  local fence = (tonumber(task[12] or string.match(task[13] or '', '^%d+') or '') or 0) + 1
  local lease = int(fence) .. '.' .. int(endpoint.epoch) .. '.' .. process
  call('HSET', job_key(id), 'status', 'started', 'x_fence', int(fence), 'x_lease', lease, 'x_ep', endpoint.id,
    'x_run', NOW, 'started_at', started_at, 'worker_name', process)
  if not task[6] then call('PERSIST', job_key(id)) end -- RQ's `ttl` is for the wait: its worker does the same
  hand(id, task, endpoint.id, lease)
end

-- Given before, in a reply that was lost: the same lease, from now on.
local function give_again(id, endpoint, lease)
  local task = fields_of(id, unpack(FIELDS_OF_TASK))
  call('HSET', job_key(id), 'x_run', NOW, 'started_at', started_at)
  hand(id, task, endpoint, lease)
end

local function enter_half_open(endpoint, id)
  if endpoint.state ~= 'closed' then
    if endpoint.state == 'open' then
      endpoint.epoch = endpoint.epoch + 1
      call('HSET', endpoint_key(endpoint.id), 'state', 'half_open', 'epoch', int(endpoint.epoch), 'good', 0)
      endpoint.state = 'half_open'
    end
    call('HSET', endpoint_key(endpoint.id), 'probe', id)
  end
end

-- What was popped for several endpoints at once. A call looks at a bounded number of entries, so that a long run of dead
-- ones does not hold the server.
local popped, next_popped, popped_from, looked = {}, 1, nil, 0

-- The next entry: its id and list. `want`: how many more the class has endpoints for.
local function next_entry(class, want)
  if not popped[next_popped] then
    if looked >= 2000 then return nil end
    local list, only = next_list(class)
    if not list then return nil end
    popped, next_popped, popped_from = call('LPOP', list_key(list.variant), only and want or 1) or {}, 1, list.variant
    looked = looked + #popped
    if #popped == 0 then
      list.length = 0
      unlisted(list.variant)
      return next_entry(class, want)
    end
    list.length = list.length - #popped
    class.waiting = class.waiting - #popped
    if list.length <= 0 and list.variant ~= '' and call('LLEN', list_key(list.variant)) == 0 then unlisted(list.variant) end
  end
  next_popped = next_popped + 1
  return popped[next_popped - 1], popped_from
end

-- Takes entries until `quota` tasks have started on the endpoint. Returns how many did.
local function take(class, endpoint, quota, want)
  local started = 0
  while started < quota and given < most do
    local id, variant = next_entry(class, math.min(want - started, most - given))
    if not id then break end
    local task = admit(id, variant)
    if task then
      enter_half_open(endpoint, id)
      start(id, task, endpoint)
      started = started + 1
    end
  end
  return started
end

-- Endpoints of this process that got something, in the order of the rule, so that `last` keeps the rotation.
local function in_order(handed)
  local list = {}
  for _, id in ipairs(mine) do
    local endpoint = view.by_id[id]
    if endpoint and (handed[id] or 0) > 0 then list[#list + 1] = endpoint end
  end
  table.sort(list, function(a, b)
    if a.priority ~= b.priority then return a.priority > b.priority end
    local load_a, load_b = a.in_flight / a.cap, b.in_flight / b.cap
    if load_a ~= load_b then return load_a < load_b end
    if a.last ~= b.last then return a.last < b.last end
    return a.id < b.id
  end)
  return list
end

for _, lost in ipairs(unknown) do give_again(unpack(lost)) end

local reserved, list = false, {}
for _, class in ipairs(classes) do
  local handed = hand_out(class)
  list = in_order(handed)
  -- A small batch must not all go to the first endpoint: the shares shrink together.
  local wanted, quotas = 0, {}
  for at, endpoint in ipairs(list) do
    quotas[at] = math.min(handed[endpoint.id], own_limit(endpoint))
    wanted = wanted + quotas[at]
  end
  local scale = wanted > most - given and (most - given) / wanted or 1
  wanted = 0
  for at in ipairs(list) do
    quotas[at] = math.min(quotas[at], math.ceil(quotas[at] * scale))
    wanted = wanted + quotas[at]
  end
  for at, endpoint in ipairs(list) do
    if quotas[at] > 0 then
      local started = take(class, endpoint, quotas[at], wanted)
      wanted = wanted - quotas[at]
      if started > 0 then
        took[endpoint.id] = (took[endpoint.id] or 0) + started
        rooms[endpoint.id] = rooms[endpoint.id] - started
      end
      handed[endpoint.id] = handed[endpoint.id] - started
    end
  end
  for id, count in pairs(handed) do
    if count > 0 and class.waiting > 0 then
      reserved = true
      ring(view, id, count)
    end
  end
end

write_sums(sums)

-- Those that got something; of one class alone they stand in their order already.
local function started_on(endpoints)
  local some = {}
  for _, endpoint in ipairs(endpoints) do
    if took[endpoint.id] then some[#some + 1] = endpoint end
  end
  return some
end
local served = #classes == 1 and started_on(list) or in_order(took)
if #served > 0 then
  local before_these = call('HINCRBY', K_POOL, 'seq', #served) - #served
  for at, endpoint in ipairs(served) do call('HSET', endpoint_key(endpoint.id), 'last', int(before_these + at)) end
end

-- Stay on the list of those who will answer a doorbell.
local text, room_left = {}, 0
for _, id in ipairs(mine) do
  if rooms[id] > 0 then
    text[#text + 1] = id .. '=' .. int(rooms[id])
    room_left = room_left + rooms[id]
  end
end
if room_left > 0 then
  call('HSET', K_WAITING, process, int(now) .. '|0|' .. table.concat(text, ','))
else
  call('HDEL', K_WAITING, process)
end

local left = 0
for _, class in ipairs(classes) do left = left + class.waiting end

local function wake_after()
  local wake = -1
  local function by(ms)
    ms = math.max(1, ms)
    if wake < 0 or ms < wake then wake = ms end
  end
  if first_due then by(first_due - now) end
  if left > 0 and room_left > 0 then
    if given >= most or looked >= 2000 then by(1) end
    if reserved then by(spill) end
    for _, id in ipairs(with_room) do
      local endpoint = view.by_id[id]
      if endpoint and endpoint.pause > now then by(endpoint.pause - now) end
      if endpoint and endpoint.state == 'open' and endpoint.opens > now then by(endpoint.opens - now) end
    end
  end
  return wake
end

if moved then announce(now, spill) end

local stale = {}
for _, id in ipairs(left > 0 and with_room or {}) do
  if view.by_id[id] and view.by_id[id].stale then stale[#stale + 1] = id end
end
return {wake_after(), left, tasks, stale, NOW}
