-- release: started -> queued, at the head of its list. No attempt is counted; the endpoint may be paused.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, n, then n times 4: id, lease, endpoint, pause ms (0 none)
-- Returns n words: "done" | "already" | "lost" | "canceled"
-- needs: lease, breaker, adapt, ready, select

local now = server_ms()
write_when_full()
local words_out, released = {}, false

for i = tonumber(ARGV[3]), 1, -1 do -- from the last, so that the first comes to stand at the head
  local at = 3 + (i - 1) * 4
  local id, lease, endpoint = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local word = fence(id, lease)
  if word == 'held' then
    free_slot(id, lease, endpoint)
    call('HDEL', job_key(id), 'x_lease', 'x_ep', 'x_run')
    call('HSET', job_key(id), 'x_done', lease)
    make_ready(id, now, true)
    call('HINCRBY', K_POOL, 'n_released', 1)
    released, word = true, 'done'
  elseif word == 'canceled' then
    free_canceled(id, lease, endpoint)
  end
  if tonumber(ARGV[at + 4]) > 0 and is_news(id, lease, word) then
    pause_endpoint(endpoint, now, tonumber(ARGV[at + 4]))
    adapt_down(endpoint, now)
  end
  words_out[i] = word
end
if released then announce(now, spill_after()) end
return words_out
