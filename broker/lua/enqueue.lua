-- enqueue: (nothing) -> queued | scheduled.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, max_depth (0: the pool's own), n, then n times 5:
--         id, data, digest (or "", where the id was made for this task alone), description, options: "" or
--         "<priority>|<requires>|<delay ms>|<deadline ms from now, 0 none>|<max attempts, 0 the pool's>|<reply list>|
--         <idempotency key>"
--         and, if the call is one part of several that are under way together: their common id, the part's number from 0.
--         It does nothing unless the part before it was done, so that what is queued are the first tasks, in their order
-- Returns, for each that was not queued: its number, "already" | "full" | "conflict" | "after" (a part before it was not
-- done), id (the earlier one for already and conflict)
-- The id is the client's, so a call whose reply was lost may be made again.
-- needs: lists
-- rarely: select

local now = server_ms()
local created_at = date_text(now)
local limit, n = tonumber(ARGV[3]), tonumber(ARGV[4])
local policy = call('HMGET', K_POOL, 'max_depth', 'spill_after')
if limit == 0 then limit = tonumber(policy[1] or '') or 100000 end

local part = tonumber(ARGV[6 + n * 5] or '') -- nil: a call by itself
local parts_key = part and P .. ':x:parts:' .. ARGV[5 + n * 5]
if part and part > 0 and call('GET', parts_key) ~= int(part - 1) then
  local reply = {}
  for i = 1, n do
    reply[#reply + 1] = i
    reply[#reply + 1] = 'after'
    reply[#reply + 1] = ARGV[i * 5]
  end
  return reply
end

local function depth()
  local total = call('LLEN', K_QUEUE) + call('ZCARD', K_SCHEDULED)
  for _, variant in ipairs(call('SMEMBERS', K_LISTS)) do total = total + call('LLEN', list_key(variant)) end
  return total
end

-- Who was told the id of a task without digest may enqueue it again by that: its data tell whether it is the same.
local function same(id, data, digest)
  if digest == '' then return true end
  local theirs = fields_of(id, 'x_dig', 'origin', 'data')
  if theirs[1] then return theirs[1] == digest end
  return theirs[2] == pool and theirs[3] == data
end

local function earlier(id, data, idem, digest)
  if idem ~= '' then
    local found = call('GET', P .. ':x:idem:' .. pool .. ':' .. idem)
    if found then
      local other, theirs = string.match(found, '^(%S+) (%S*)$')
      if other and call('EXISTS', job_key(other)) == 1 then
        return theirs == digest and 'already' or 'conflict', other
      end
    end
  end
  if call('EXISTS', job_key(id)) == 1 then
    return same(id, data, digest) and 'already' or 'conflict', id
  end
end

local room = limit - depth()
if room < n then
  for _, count in ipairs(call('HVALS', K_GHOSTS)) do room = room + count end
end
local reply, ready, queued, refused = {}, {}, 0, false

local OPTIONS = '^(%a+)|([^|]*)|(%d+)|(%d+)|(%d+)|([^|]*)|(.*)$'
local TIMEOUT = '360' -- seconds, for a stock RQ worker
local PARTS_TTL = 60000
local NOW, words_in = int(now), ARGV

for at = 5, n * 5, 5 do
  local id, digest, options = words_in[at], words_in[at + 2], words_in[at + 4]
  local priority, requires, delay, deadline, attempts, to, idem = 'normal', '', 0, 0, '0', '', ''
  if options ~= '' then
    priority, requires, delay, deadline, attempts, to, idem = string.match(options, OPTIONS)
    delay, deadline = tonumber(delay), tonumber(deadline)
  end
  local word, known = earlier(id, words_in[at + 1], idem, digest)
  if not word and room <= 0 then word, known, refused = 'full', id, true end
  if not word then
    local key = job_key(id)
    call('HSET', key, 'data', words_in[at + 1], 'created_at', created_at, 'enqueued_at', created_at, 'origin', pool,
      'description', words_in[at + 3], 'timeout', TIMEOUT, 'status', delay > 0 and 'scheduled' or 'queued',
      'x_born', NOW)
    if digest ~= '' then call('HSET', key, 'x_dig', digest) end
    if options ~= '' then
      local fields = {}
      local function field(name, value)
        fields[#fields + 1] = name
        fields[#fields + 1] = value
      end
      if priority ~= 'normal' then field('x_pri', priority) end
      if requires ~= '' then field('x_req', requires) end
      if attempts ~= '0' then field('x_max', attempts) end
      if to ~= '' then field('x_reply', to) end
      if idem ~= '' then field('x_idem', idem) end
      if deadline > 0 then field('x_dl', int(now + deadline)) end
      if #fields > 0 then call('HSET', key, unpack(fields)) end
    end
    if idem ~= '' then
      call('SET', P .. ':x:idem:' .. pool .. ':' .. idem, id .. ' ' .. digest, 'PX', IDEM_TTL)
    end
    if deadline > 0 then call('ZADD', K_DEADLINES, int(now + deadline), id) end
    if delay > 0 then
      call('ZADD', K_SCHEDULED, seconds(now + delay), id)
    else
      local variant = options ~= '' and variant_of(priority, requires, '') or ''
      local ids = ready[variant]
      if not ids then
        ids = {}
        ready[variant] = ids
      end
      ids[#ids + 1] = id
    end
    room = room - 1
    queued = queued + 1
  else
    reply[#reply + 1] = at / 5
    reply[#reply + 1] = word
    reply[#reply + 1] = known
  end
end

local pushed = 0
for variant, ids in pairs(ready) do
  local length = call('RPUSH', list_key(variant), unpack(ids))
  if length == #ids then listed(variant) end
  pushed = pushed + #ids
end
if queued > 0 then -- a repeat writes nothing, so it is answered when memory is full too
  call('SADD', K_QUEUES, K_QUEUE)
  call('HINCRBY', K_POOL, 'n_enqueued', queued)
end
if part and not refused then
  if queued == 0 then write_when_full() end
  call('SET', parts_key, int(part), 'PX', PARTS_TTL)
end
if pushed > 0 and call('HLEN', K_WAITING) > 0 then rarely().announce(now, rarely().spill_of(policy[2])) end
return reply
