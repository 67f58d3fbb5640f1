-- Ordered pull: which endpoint should take how many of the waiting tasks, now.
-- Order: higher priority, then lower in_flight/max_concurrent, then longest since its last claim, then id.
-- An endpoint counts as free while a waiting process will answer for it: one that did not answer its doorbell within
-- spill_after is not counted until it speaks again. tests/support/reference.py holds the same rule in Python.
-- needs: lists

local SILENT_AFTER = 5000      -- ms; processes speak at least every 2 s
local LIVE_FOR = 30000         -- ms since an endpoint's worker last renewed: it still counts for exclusions

-- field of rq:x:waiting: process -> "<spoke>|<rung>|<endpoint>=<room>,..."
local function read_waiting(now, spill)
  local found = {}
  local raw = call('HGETALL', K_WAITING)
  for at = 1, #raw, 2 do
    local spoke, rung, rooms = string.match(raw[at + 1], '^(%d+)|(%d+)|(.*)$')
    if spoke then
      spoke, rung = tonumber(spoke), tonumber(rung)
      local trusted = now - spoke <= SILENT_AFTER and (rung == 0 or now - rung < spill)
      local process = {name = raw[at], spoke = spoke, rung = rung, text = rooms, trusted = trusted, rooms = {}}
      for endpoint, room in string.gmatch(rooms, '([^=,]+)=(%d+)') do process.rooms[endpoint] = tonumber(room) end
      found[#found + 1] = process
    end
  end
  return found
end

local function write_waiting(process)
  call('HSET', K_WAITING, process.name, int(process.spoke) .. '|' .. int(process.rung) .. '|' .. process.text)
end

local FIELDS = {'priority', 'cap', 'on', 'capabilities', 'state', 'until', 'pause', 'last', 'seen', 'drain', 'probe',
  'epoch', 'healthy', 'checked', 'ramp', 'auto'}

-- How many more requests the endpoint may have in flight, whoever asks. One that idled for longer than a check is good
-- for is checked first: `stale`.
local function free_slots(endpoint, now, check_after)
  if not endpoint.on or endpoint.drain or endpoint.pause > now or endpoint.healthy == '0' then return 0 end
  if check_after > 0 and endpoint.in_flight == 0 and now - endpoint.checked > check_after then
    endpoint.stale = true
    return 0
  end
  if endpoint.state == 'open' and endpoint.opens > now then return 0 end
  local free = math.max(0, math.min(endpoint.cap, endpoint.ramp or endpoint.cap) - endpoint.in_flight)
  if endpoint.state ~= 'closed' then
    local probing = endpoint.probe and call('ZSCORE', slots_key(endpoint.id), endpoint.probe)
    return (free > 0 and not probing) and 1 or 0
  end
  return free
end

local function read_endpoint(id, now, check_after)
  local record = call('HMGET', endpoint_key(id), unpack(FIELDS))
  local endpoint = {
    id = id, priority = tonumber(record[1] or '') or 5, cap = tonumber(record[2] or '') or 1,
    on = record[3] == '1', capabilities = record[4] or '', state = record[5] or 'closed',
    opens = tonumber(record[6] or '') or 0, pause = tonumber(record[7] or '') or 0,
    last = tonumber(record[8] or '') or 0, seen = tonumber(record[9] or '') or 0,
    drain = record[10] == '1', probe = record[11] or nil, epoch = tonumber(record[12] or '') or 0,
    healthy = record[13], checked = tonumber(record[14] or '') or 0, ramp = tonumber(record[15] or ''),
    in_flight = call('ZCARD', slots_key(id)), rung = {},
  }
  endpoint.free = free_slots(endpoint, now, check_after)
  return endpoint
end

-- in_flight as if every task already handed out were running.
local function before(a, b)
  local load_a, load_b = a.load / a.cap, b.load / b.cap
  if load_a ~= load_b then return load_a < load_b end
  if a.last ~= b.last then return a.last < b.last end
  return a.id < b.id
end

-- Everything a decision needs, read once. mine: endpoint id -> room, of the process that asks ('' for none). check_after:
-- ms that a check is good for; none for who announces tasks: it rings for a stale endpoint too, whose process checks it.
local function read_view(now, spill, asker, mine, check_after)
  local view = {now = now, endpoints = {}, by_id = {}, waiting = {}, asker = asker}
  local room = {}
  for _, process in ipairs(read_waiting(now, spill)) do
    if process.name ~= asker then
      view.waiting[#view.waiting + 1] = process
      if process.trusted then
        for id, count in pairs(process.rooms) do room[id] = (room[id] or 0) + count end
      end
    end
  end
  for _, id in ipairs(call('SMEMBERS', K_ENDPOINTS)) do
    local endpoint = read_endpoint(id, now, check_after or 0)
    endpoint.sibling_room = room[id] or 0
    endpoint.counted = math.min(endpoint.free, endpoint.sibling_room + (mine[id] or 0))
    endpoint.load = endpoint.in_flight
    view.endpoints[#view.endpoints + 1] = endpoint
    view.by_id[id] = endpoint
  end
  table.sort(view.endpoints, function(a, b)
    if a.priority ~= b.priority then return a.priority > b.priority end
    return a.id < b.id
  end)
  return view
end

local function live(view, endpoint)
  if not endpoint.on or endpoint.drain or endpoint.healthy == '0' then return false end
  if endpoint.state == 'open' and endpoint.opens > view.now then return false end
  return endpoint.counted > 0 or view.now - endpoint.seen <= LIVE_FOR
end

-- The endpoints that may take the tasks of one list. Excluded ones only when no other is live: a pool of one endpoint
-- must still retry, and a task must not wait for an endpoint that is out.
local function allow(view, class)
  local capable, rest, any_live = {}, {}, false
  local excluded = set_of(words(class.excluded))
  for _, endpoint in ipairs(view.endpoints) do
    local has = true
    if class.requires ~= '' then
      local own = set_of(words(endpoint.capabilities))
      for _, needed in ipairs(words(class.requires)) do has = has and own[needed] end
    end
    if has then
      capable[#capable + 1] = endpoint
      if not excluded[endpoint.id] then
        rest[#rest + 1] = endpoint
        any_live = any_live or live(view, endpoint)
      end
    end
  end
  class.allowed = any_live and rest or capable
end

-- Waiting tasks by class (the same endpoints may take them), each with a list per priority.
local RANK = {high = 1, normal = 2, low = 3}

local function read_classes(view)
  local classes, by_name = {}, {}
  local variants = call('SMEMBERS', K_LISTS)
  local indexed = set_of(variants)
  if call('EXISTS', list_key('high'), list_key('low')) > 0 then -- a plain RQ producer puts tasks there, and indexes none
    for _, variant in ipairs({'high', 'low'}) do
      if not indexed[variant] and call('EXISTS', list_key(variant)) == 1 then
        listed(variant)
        variants[#variants + 1] = variant
      end
    end
  end
  variants[#variants + 1] = ''
  for _, variant in ipairs(variants) do
    local length = call('LLEN', list_key(variant))
    if length > 0 then
      local priority, requires, excluded = string.match(variant, '^(%a*)%+?([^!]*)!?(.*)$')
      if priority == '' then priority = 'normal' end
      local name = requires .. '!' .. excluded
      local class = by_name[name]
      if not class then
        class = {requires = requires, excluded = excluded, waiting = 0, lists = {}, rank = 9}
        by_name[name] = class
        classes[#classes + 1] = class
      end
      class.waiting = class.waiting + length
      class.rank = math.min(class.rank, RANK[priority] or 2)
      class.lists[#class.lists + 1] = {variant = variant, length = length, rank = RANK[priority] or 2}
    elseif variant ~= '' then
      unlisted(variant)
    end
  end
  for _, class in ipairs(classes) do
    table.sort(class.lists, function(a, b) return a.rank < b.rank end)
    allow(view, class)
    if #classes > 1 then
      local head = call('LINDEX', list_key(class.lists[1].variant), 0)
      class.head = head and tonumber(fields_of(head, 'x_at')[1] or '') or 0
    end
  end
  return classes
end

-- True for a share of all numbers, spread evenly, and of every second, third ... number too: with `number % 8 == 0` a
-- process whose calls always fell on odd turns would never serve the old.
local function falls(number, share) return (number * 0.6180339887498949) % 1 < share end

-- Best priority first, then the oldest head. by_age: the oldest head whatever its priority, so that none starves.
local function sort_classes(classes, by_age)
  if #classes < 2 then return end
  table.sort(classes, function(a, b)
    if not by_age and a.rank ~= b.rank then return a.rank < b.rank end
    if a.head ~= b.head then return a.head < b.head end
    return (a.requires .. '!' .. a.excluded) < (b.requires .. '!' .. b.excluded)
  end)
end

-- Hands `count` tasks one by one to the least loaded of the tier; by levels first where that is long, with the same
-- result: all hand-outs below a load are made before any at it.
local function water_fill(tier, count)
  local handed = {}
  for _, endpoint in ipairs(tier) do handed[endpoint.id] = 0 end
  if count * #tier > 2000 then
    local low, high = 0, 0
    for _, endpoint in ipairs(tier) do
      high = math.max(high, (endpoint.load + endpoint.counted) / endpoint.cap)
    end
    local function below(level, endpoint)
      return math.max(0, math.min(endpoint.counted, math.ceil(level * endpoint.cap - endpoint.load)))
    end
    for _ = 1, 40 do
      local level, total = (low + high) / 2, 0
      for _, endpoint in ipairs(tier) do total = total + below(level, endpoint) end
      if total <= count then low = level else high = level end
    end
    for _, endpoint in ipairs(tier) do
      local given = below(low, endpoint)
      handed[endpoint.id] = given
      endpoint.load, endpoint.counted = endpoint.load + given, endpoint.counted - given
      count = count - given
    end
  end
  while count > 0 do
    local best
    for _, endpoint in ipairs(tier) do
      if endpoint.counted > 0 and (not best or before(endpoint, best)) then best = endpoint end
    end
    if not best then break end
    handed[best.id] = handed[best.id] + 1
    best.load, best.counted = best.load + 1, best.counted - 1
    count = count - 1
  end
  return handed
end

-- The rule: tiers from the top; a tier that the tasks cover takes all it has slots for, the next water-fills the rest.
-- Takes what it hands out from the endpoints' counted slots. Returns endpoint id -> tasks.
local function hand_out(class)
  local handed, remaining, at = {}, class.waiting, 1
  local allowed = class.allowed
  while remaining > 0 and at <= #allowed do
    local tier, free, priority = {}, 0, allowed[at].priority
    while at <= #allowed and allowed[at].priority == priority do
      tier[#tier + 1] = allowed[at]
      free = free + allowed[at].counted
      at = at + 1
    end
    if free > 0 and remaining >= free then
      for _, endpoint in ipairs(tier) do
        handed[endpoint.id] = endpoint.counted
        endpoint.load, endpoint.counted = endpoint.load + endpoint.counted, 0
      end
    elseif free > 0 then
      for id, count in pairs(water_fill(tier, remaining)) do handed[id] = count end
    end
    remaining = remaining - free
  end
  return handed
end

-- Rings waiting processes for tasks that fall to their endpoint, one a task. Returns true if any had been waiting.
local function ring(view, endpoint, count)
  local candidates = {}
  for _, process in ipairs(view.waiting) do
    local room = process.rooms[endpoint]
    if process.trusted and room and room > 0 then candidates[#candidates + 1] = process end
  end
  table.sort(candidates, function(a, b)
    local room_a, room_b = a.rooms[endpoint], b.rooms[endpoint]
    if room_a ~= room_b then return room_a > room_b end
    return a.name < b.name
  end)
  for at = 1, math.min(count, #candidates) do
    local process = candidates[at]
    if process.rung == 0 then
      process.rung = view.now
      write_waiting(process)
      local bell = P .. ':x:bell:' .. process.name
      call('LPUSH', bell, 'work')
      call('PEXPIRE', bell, 60000)
    end
  end
  return #candidates > 0
end

-- For verbs that make tasks ready and take none: announce what waits.
local function announce(now, spill)
  if call('HLEN', K_WAITING) == 0 then return end
  local view = read_view(now, spill, '', {})
  if #view.waiting == 0 then return end
  local classes = read_classes(view)
  sort_classes(classes, false)
  for _, class in ipairs(classes) do
    for id, count in pairs(hand_out(class)) do
      if count > 0 then ring(view, id, count) end
    end
  end
end

local function spill_of(text) return tonumber(text or '') or 100 end
local function spill_after() return spill_of(call('HGET', K_POOL, 'spill_after')) end
