-- dead_letter: started -> dead (or expired, when the deadline ended the attempts).
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, dead letter ttl ms, result ttl ms, n, then n times 8:
--         id, lease, endpoint, verdict for the breaker, reason, answer (JSON, newline, body), history line (JSON),
--         exception text (base64 of zlib, for a plain RQ producer, else "")
--         A reason that starts with "expired" makes the outcome `expired`.
-- Returns n words: "done" | "already" | "lost" | "canceled"
-- Returns also, behind the words, what became of breakers: see breaker.lua, events.
-- needs: breaker, lease

local now = server_ms()
local dead_ttl, result_ttl = tonumber(ARGV[3]), tonumber(ARGV[4])
write_when_full()
local words_out = {}

for i = 1, tonumber(ARGV[5]) do
  local at = 5 + (i - 1) * 8
  local id, lease, endpoint, verdict, reason = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  local word = fence(id, lease)
  if word == 'held' then
    free_slot(id, lease, endpoint)
    local key = job_key(id)
    count(key, 'x_try')
    local expired = string.sub(reason, 1, 7) == 'expired'
    local history = (call('HGET', key, 'x_hist') or '') .. ARGV[at + 7] .. '\n'
    conclude(id, expired and 'expired' or 'dead', 'failed', now, expired and result_ttl or dead_ttl,
      {'x_why', reason, 'exc_info', reason, 'x_ans', ARGV[at + 6], 'x_hist', history,
       'x_done', lease})
    if ARGV[at + 8] ~= '' then
      local results = P .. ':results:' .. id
      call('XADD', results, 'MAXLEN', '~', 10, '*', 'type', 2, 'worker_name', '', 'exc_string', ARGV[at + 8])
      local left = call('PTTL', key)
      if left > 0 then call('PEXPIRE', results, int(left)) end
    end
    word = 'done'
  elseif word == 'canceled' then
    free_canceled(id, lease, endpoint)
  end
  if is_news(id, lease, word) and known(endpoint) then
    call('HINCRBY', endpoint_key(endpoint), verdict == 'good' and 'served' or 'failed', 1)
    breaker_result(endpoint, lease, verdict, now, reason)
  end
  words_out[i] = word
end
for _, event in ipairs(events) do words_out[#words_out + 1] = event end
return words_out
