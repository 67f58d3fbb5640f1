-- finish: started -> ok. First write frees the slot: allowed when Redis' memory is full.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, result ttl ms, n, then n times 5:
--         id, lease, endpoint, answer (JSON, newline, body), return value (base64, for a plain RQ producer, else "")
-- Returns n words: "done" | "already" | "lost" | "canceled"
-- Returns also, behind the words, what became of breakers: see breaker.lua, events.
-- needs: lease, breaker, adapt

local now = server_ms()
local ttl, n = tonumber(ARGV[3]), tonumber(ARGV[4])
local words_out, good = {}, {}
local held, sums = {}, new_sums()

local function finish(at, task, sum)
  local id = ARGV[at + 1]
  sum.ran = sum.ran + conclude_in(sums, id, task, 'ok', 'finished', now, ttl, {
    'x_ans', ARGV[at + 4], 'x_done', fence_of(ARGV[at + 2]),
  })
  if ARGV[at + 5] ~= '' then
    local results = P .. ':results:' .. id
    call('XADD', results, 'MAXLEN', '~', 10, '*', 'type', 1, 'worker_name', '', 'return_value', ARGV[at + 5])
    local left = call('PTTL', job_key(id))
    if left > 0 then call('PEXPIRE', results, int(left)) end
  end
end

-- Slots first, those of one endpoint together, then the hashes. `held` has triples: where its arguments stand, task, sum.
local slots, mirror = {}, {}
local function finish_held()
  for endpoint, ids in pairs(slots) do call_with('ZREM', slots_key(endpoint), ids) end
  if #mirror > 0 then call_with('ZREM', K_WIP, mirror) end
  for at = 1, #held, 3 do finish(held[at], held[at + 1], held[at + 2]) end
  held, slots, mirror = {}, {}, {}
end

-- What the endpoint did in one epoch of its breaker. Most leases of a call are the same text.
local last, answered = {}, {}
local function sum_of(endpoint, lease)
  if last.endpoint == endpoint and last.lease == lease then return last.sum end
  local name = endpoint .. ' ' .. epoch_of(lease)
  local sum = good[name]
  if not sum then
    sum = {endpoint = endpoint, lease = lease, count = 0, ran = 0}
    good[name], good[#good + 1] = sum, sum
  end
  last = {endpoint = endpoint, lease = lease, sum = sum}
  return sum
end

local seen = {}
for i = 1, n do
  local at = 4 + (i - 1) * 5
  local id, lease, endpoint = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  if seen[id] then finish_held() end -- what comes second must see what the first did
  seen[id] = true
  local word, task = fence(id, lease)
  if word == 'held' then
    local sum = sum_of(endpoint, lease)
    sum.count, answered[endpoint] = sum.count + 1, (answered[endpoint] or 0) + 1
    local next_held = #held
    held[next_held + 1], held[next_held + 2], held[next_held + 3] = at, task, sum
    local ids = slots[endpoint]
    if not ids then
      ids = {}
      slots[endpoint] = ids
    end
    ids[#ids + 1] = id
    mirror[#mirror + 1] = id .. ':' .. lease
    word = 'done'
  elseif word == 'canceled' then
    free_canceled(id, lease, endpoint)
  end
  words_out[i] = word
end
finish_held()
write_sums(sums)

-- What an endpoint did is read and written at once: with many endpoints a call has few tasks for each.
local OF_SERVED = {unpack(OF_BREAKER)}
for _, name in ipairs({'on', 'healthy', 'auto', 'served', 'run_ms', unpack(RATE)}) do OF_SERVED[#OF_SERVED + 1] = name end

local function served(sum)
  local endpoint, key = sum.endpoint, endpoint_key(sum.endpoint)
  local record = call('HMGET', key, unpack(OF_SERVED))
  if not record[8] and not known(endpoint) then return end
  local count, fields = sum.count, {}
  if counts(record, sum.lease) then
    good_results(endpoint, key, record, count)
    local window = record[1] ~= 'half_open' and rate_window() or 0
    if window > 0 then fields = rate_with(record[13], record[14], record[15], math.floor(now / window), count, 0) end
  end
  local n = #fields
  fields[n + 1], fields[n + 2] = 'served', int(whole_of(record[11]) + count)
  fields[n + 3], fields[n + 4] = 'run_ms', int(whole_of(record[12]) + sum.ran)
  if record[9] then fields[n + 5], fields[n + 6] = 'checked', int(now) end -- an answer is a check
  call('HSET', key, unpack(fields))
  if record[10] == '1' then adapt(endpoint, now, count, call('ZCARD', slots_key(endpoint)) + answered[endpoint]) end
end

-- Once an epoch: a late answer to an old lease must not stand for the probe's.
for _, sum in ipairs(good) do served(sum) end
for _, event in ipairs(events) do words_out[#words_out + 1] = event end
return words_out
