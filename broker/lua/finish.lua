-- finish: started -> ok. First write frees the slot: allowed when Redis' memory is full.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, result ttl ms, ended_at (RQ's text), n, then n times 6:
--         id, lease, endpoint, answer (JSON), body, return value (base64, for a plain RQ producer, else "")
-- Returns n words: "done" | "already" | "lost" | "canceled"
-- needs: breaker

local now = server_ms()
local ttl, ended_at = tonumber(ARGV[3]), ARGV[4]
local words_out, good = {}, {}

for i = 1, tonumber(ARGV[5]) do
  local at = 5 + (i - 1) * 6
  local id, lease, endpoint = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local word = fence(id, lease)
  if word == 'held' then
    free_slot(id, lease, endpoint)
    call('HINCRBY', job_key(id), 'x_try', 1)
    conclude(id, 'ok', 'finished', now, ttl,
      {'x_ans', ARGV[at + 4], 'x_body', ARGV[at + 5], 'x_done', lease, 'ended_at', ended_at})
    if ARGV[at + 6] ~= '' then
      local results = P .. ':results:' .. id
      call('XADD', results, 'MAXLEN', '~', 10, '*', 'type', 1, 'worker_name', '', 'return_value', ARGV[at + 6])
      local left = call('PTTL', job_key(id))
      if left > 0 then call('PEXPIRE', results, int(left)) end
    end
    local name = endpoint .. ' ' .. epoch_of(lease)
    good[name] = {endpoint, lease, (good[name] and good[name][3] or 0) + 1}
    word = 'done'
  elseif word == 'canceled' then
    free_canceled(id, lease, endpoint)
  end
  words_out[i] = word
end

-- Once an epoch: a late answer to an old lease must not stand for the probe's.
for _, item in pairs(good) do
  call('HINCRBY', endpoint_key(item[1]), 'served', item[3])
  breaker_result(item[1], item[2], 'good', now, '')
end
return words_out
