-- finish: started -> ok. First write frees the slot: allowed when Redis' memory is full.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, result ttl ms, ended_at (RQ's text), n, then n times 6:
--         id, lease, endpoint, answer (JSON), body, return value (base64, for a plain RQ producer, else "")
-- Returns n words: "done" | "already" | "lost" | "canceled"
-- Returns also, behind the words, what became of breakers: see breaker.lua, events.
-- needs: breaker, adapt

local now = server_ms()
local ttl, ended_at = tonumber(ARGV[3]), ARGV[4]
local words_out, good = {}, {}

for i = 1, tonumber(ARGV[5]) do
  local at = 5 + (i - 1) * 6
  local id, lease, endpoint = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local word = fence(id, lease)
  if word == 'held' then
    free_slot(id, lease, endpoint)
    count(job_key(id), 'x_try')
    local in_flight = call('ZCARD', slots_key(endpoint)) + 1
    local ran = conclude(id, 'ok', 'finished', now, ttl,
      {'x_ans', ARGV[at + 4], 'x_body', ARGV[at + 5], 'x_done', lease, 'ended_at', ended_at})
    if ARGV[at + 6] ~= '' then
      local results = P .. ':results:' .. id
      call('XADD', results, 'MAXLEN', '~', 10, '*', 'type', 1, 'worker_name', '', 'return_value', ARGV[at + 6])
      local left = call('PTTL', job_key(id))
      if left > 0 then call('PEXPIRE', results, int(left)) end
    end
    local name = endpoint .. ' ' .. epoch_of(lease)
    local sum = good[name] or {endpoint = endpoint, lease = lease, count = 0, ran = 0, in_flight = 0}
    sum.count, sum.ran, sum.in_flight = sum.count + 1, sum.ran + ran, math.max(sum.in_flight, in_flight)
    good[name] = sum
    word = 'done'
  elseif word == 'canceled' then
    free_canceled(id, lease, endpoint)
  end
  words_out[i] = word
end

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
