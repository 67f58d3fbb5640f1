-- Ordered pull: which endpoint should take how many of the waiting tasks, now.
-- Order: higher priority, then lower in_flight/max_concurrent, then longest since its last claim, then id.
-- An endpoint counts as free while a waiting process will answer for it: one that did not answer its doorbell within
-- spill_after is not counted until it speaks again. tests/support/reference.py holds the same rule in Python.
-- needs: lists

local SILENT_AFTER = 5000      -- ms; processes speak at least every 2 s
local LIVE_FOR = 30000         -- ms since an endpoint's worker last renewed: it still counts for exclusions

-- field of rq:x:waiting: process -> "<spoke>|<rung>|<endpoint>=<room>,..."; all but the one that asks
local function read_waiting(now, spill, asker)
  local found = {}
  local raw = call('HGETALL', K_WAITING)
  for at = 1, #raw, 2 do
    local spoke, rung, rooms
    if raw[at] ~= asker then spoke, rung, rooms = string.match(raw[at + 1], '^(%d+)|(%d+)|(.*)$') end
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
  'epoch', 'healthy', 'checked', 'ramp'}

-- `room`: how many more its waiting siblings offer to run; `mine`: how many more who asks.
-- Its fields are few: a table of over 16 costs twice as much, and a claim makes one for each endpoint.
--   free     how many more it may have in flight, whoever asks
--   counted  of those, how many somebody waits for
--   stale    it idled for longer than a check is good for, and is checked first
--   up       it may be given tasks, now or when it is free
local function read_endpoint(id, now, check_after, room, mine)
  local record, in_flight = call('HMGET', endpoint_key(id), unpack(FIELDS)), call('ZCARD', slots_key(id))
  local cap, state, opens, pause = whole_of(record[2], 1), record[5] or 'closed', whole_of(record[6]), whole_of(record[7])
  local in_service = record[3] == '1' and record[10] ~= '1' and record[13] ~= '0'
  local up = in_service and not (state == 'open' and opens > now)
  local free, stale = 0, false
  if in_service and pause <= now then
    stale = check_after > 0 and in_flight == 0 and now - whole_of(record[14]) > check_after
    if up and not stale then
      free = math.max(0, math.min(cap, whole_of(record[15], cap)) - in_flight)
      if free > 0 and state ~= 'closed' then
        free = (record[11] and call('ZSCORE', slots_key(id), record[11])) and 0 or 1
      end
    end
  end
  return {
    id = id, priority = whole_of(record[1], 5), cap = cap, capabilities = record[4] or '', state = state,
    opens = opens, pause = pause, last = whole_of(record[8]), epoch = whole_of(record[12]), up = up,
    seen = whole_of(record[9]), in_flight = in_flight, load = in_flight, free = free, stale = stale,
    counted = math.min(free, room + mine),
  }
end

-- in_flight as if every task already handed out were running.
local function before(a, b)
  local load_a, load_b = a.load / a.cap, b.load / b.cap
  if load_a ~= load_b then return load_a < load_b end
  if a.last ~= b.last then return a.last < b.last end
  return a.id < b.id
end

local function any_excludes(variants)
  for _, variant in ipairs(variants) do
    if string.find(variant, '!', 1, true) then return true end
  end
  return false
end

-- Everything a decision needs, read once. mine: endpoint id -> room, of the process that asks ('' for none). check_after:
-- ms that a check is good for; none for who announces tasks: it rings for a stale endpoint too, whose process checks it.
-- While nobody else waits, nothing is counted but what who asks has room for: a process in a busy pool reads no more than
-- those. But tasks that exclude endpoints ask whether any other is live.
local function read_view(now, spill, asker, mine, check_after)
  local view = {now = now, endpoints = {}, by_id = {}, waiting = read_waiting(now, spill, asker)}
  view.variants = call('SMEMBERS', K_LISTS)
  local own_alone = asker ~= '' and #view.waiting == 0 and not any_excludes(view.variants)
  local room = {}
  for _, process in ipairs(view.waiting) do
    if process.trusted then
      for id, count in pairs(process.rooms) do room[id] = (room[id] or 0) + count end
    end
  end
  local tiers, priorities = {}, {}
  for _, id in ipairs(call('SMEMBERS', K_ENDPOINTS)) do
    if not own_alone or (mine[id] or 0) > 0 then
      local endpoint = read_endpoint(id, now, check_after or 0, room[id] or 0, mine[id] or 0)
      view.by_id[id] = endpoint
      local tier = tiers[endpoint.priority]
      if not tier then
        tier = {}
        tiers[endpoint.priority], priorities[#priorities + 1] = tier, endpoint.priority
      end
      tier[#tier + 1] = endpoint
    end
  end
  table.sort(priorities, function(a, b) return a > b end)
  for _, priority in ipairs(priorities) do -- within a tier their order says nothing: `before` does
    for _, endpoint in ipairs(tiers[priority]) do view.endpoints[#view.endpoints + 1] = endpoint end
  end
  return view
end

local function live(view, endpoint)
  return endpoint.up and (endpoint.counted > 0 or view.now - endpoint.seen <= LIVE_FOR)
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
  local variants = view.variants
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
      local since = head and fields_of(head, 'x_at', 'x_born') or {}
      class.head = tonumber(since[1] or since[2] or '') or 0
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

-- The heap's item at `at` goes down to its place: the endpoint that comes before all others is the first.
local function sink(heap, at, size)
  local item = heap[at]
  while at * 2 <= size do
    local child = at * 2
    if child < size and before(heap[child + 1], heap[child]) then child = child + 1 end
    if not before(heap[child], item) then break end
    heap[at] = heap[child]
    at = child
  end
  heap[at] = item
end

-- Hands `count` tasks one by one to the least loaded of the tier; by levels first where that is long, with the same
-- result: all hand-outs below a load are made before any at it.
local function water_fill(tier, count)
  local handed = {}
  for _, endpoint in ipairs(tier) do handed[endpoint.id] = 0 end
  if count > 4 * #tier + 100 then
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
  local heap, size = {}, 0
  for _, endpoint in ipairs(tier) do
    if endpoint.counted > 0 then
      size = size + 1
      heap[size] = endpoint
    end
  end
  for at = math.floor(size / 2), 1, -1 do sink(heap, at, size) end
  while count > 0 and size > 0 do
    local best = heap[1]
    handed[best.id] = handed[best.id] + 1
    best.load, best.counted = best.load + 1, best.counted - 1
    count = count - 1
    if best.counted == 0 then
      heap[1], heap[size] = heap[size], nil
      size = size - 1
    end
    if size > 1 then sink(heap, 1, size) end
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
