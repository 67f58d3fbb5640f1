-- finish: started -> ok. First write frees the slot: allowed when Redis' memory is full.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, result ttl ms, n, then n times 6:
--         id, lease, endpoint, answer (JSON), body, return value (base64, for a plain RQ producer, else "")
-- Returns n words: "done" | "already" | "lost" | "canceled"
-- Returns also, behind the words, what became of breakers: see breaker.lua, events.
-- needs: breaker, adapt

local now = server_ms()
local ttl, ended_at, n = tonumber(ARGV[3]), date_text(now), tonumber(ARGV[4])
local words_out, good = {}, {}
local held, sums = {}, new_sums()

local function finish(item)
  local id, lease, at, task = item.id, item.lease, item.at, item.task
  item.sum.ran = item.sum.ran + conclude_in(sums, id, task, 'ok', 'finished', now, ttl, {
    'x_ans', ARGV[at + 4], 'x_body', ARGV[at + 5], 'x_done', lease, 'ended_at', ended_at,
    'x_try', int(one_more(task[5])),
  })
  if ARGV[at + 6] ~= '' then
    local results = P .. ':results:' .. id
    call('XADD', results, 'MAXLEN', '~', 10, '*', 'type', 1, 'worker_name', '', 'return_value', ARGV[at + 6])
    local left = call('PTTL', job_key(id))
    if left > 0 then call('PEXPIRE', results, int(left)) end
  end
end

-- Slots first, those of one endpoint together, then the hashes.
local slots, mirror = {}, {}
local function finish_held()
  for endpoint, ids in pairs(slots) do call_with('ZREM', slots_key(endpoint), ids) end
  if #mirror > 0 then call_with('ZREM', K_WIP, mirror) end
  for _, item in ipairs(held) do finish(item) end
  held, slots, mirror = {}, {}, {}
end

local seen = {}
for i = 1, n do
  local at = 4 + (i - 1) * 6
  local id, lease, endpoint = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  if seen[id] then finish_held() end -- what comes second must see what the first did
  seen[id] = true
  local word, task = fence(id, lease)
  if word == 'held' then
    local name = endpoint .. ' ' .. epoch_of(lease)
    local sum = good[name]
    if not sum then
      sum = {endpoint = endpoint, lease = lease, count = 0, ran = 0, in_flight = call('ZCARD', slots_key(endpoint))}
      good[name] = sum
    end
    sum.count = sum.count + 1
    held[#held + 1] = {id = id, lease = lease, at = at, task = task, sum = sum}
    local ids = slots[endpoint] or {}
    slots[endpoint] = ids
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

-- Once an epoch: a late answer to an old lease must not stand for the probe's.
for _, item in pairs(good) do
  if known(item.endpoint) then
    local key = endpoint_key(item.endpoint)
    call('HINCRBY', key, 'served', item.count)
    call('HINCRBY', key, 'run_ms', int(item.ran))
    if call('HEXISTS', key, 'healthy') == 1 then call('HSET', key, 'checked', int(now)) end -- an answer is a check
    breaker_result(item.endpoint, item.lease, 'good', now, '', item.count)
    adapt(item.endpoint, now, item.count, item.in_flight)
  end
end
for _, event in ipairs(events) do words_out[#words_out + 1] = event end
return words_out
