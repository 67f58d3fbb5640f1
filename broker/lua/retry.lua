-- retry: started -> scheduled (or queued, with no delay). An attempt is counted and the endpoint excluded.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, n, then n times 9:
--         id, lease, endpoint, delay ms, verdict for the breaker, reason, history line (JSON), exclude 0|1,
--         pause ms for the endpoint (0 none)
-- Returns n words: "done" | "already" | "lost" | "canceled"
-- Returns also, behind the words, what became of breakers: see breaker.lua, events.
-- needs: lease, breaker, ready, select

local now = server_ms()
write_when_full()
local words_out = {}
local ready = false

local function exclude(id, endpoint)
  local excluded = call('HGET', job_key(id), 'x_excl') or ''
  local list = words(excluded)
  if not set_of(list)[endpoint] then
    list[#list + 1] = endpoint
    table.sort(list)
    call('HSET', job_key(id), 'x_excl', table.concat(list, ','))
  end
end

for i = 1, tonumber(ARGV[3]) do
  local at = 3 + (i - 1) * 9
  local id, lease, endpoint, delay = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], tonumber(ARGV[at + 4])
  local word = fence(id, lease)
  if word == 'held' then
    free_slot(id, lease, endpoint)
    local key = job_key(id)
    call('HDEL', key, 'x_lease', 'x_ep', 'x_run')
    count(key, 'x_try')
    call('HSET', key, 'x_done', lease, 'x_hist', (call('HGET', key, 'x_hist') or '') .. ARGV[at + 7] .. '\n')
    if ARGV[at + 8] == '1' then exclude(id, endpoint) end
    if delay > 0 then schedule(id, now + delay) else make_ready(id, now); ready = true end
    call('HINCRBY', K_POOL, 'n_retried', 1)
    word = 'done'
  elseif word == 'canceled' then
    free_canceled(id, lease, endpoint)
  end
  -- A failure says something about the endpoint even when the task is no longer ours; its epoch decides.
  if is_news(id, lease, word) and known(endpoint) then
    call('HINCRBY', endpoint_key(endpoint), 'failed', 1)
    breaker_result(endpoint, lease, ARGV[at + 5], now, ARGV[at + 6])
    pause_endpoint(endpoint, now, tonumber(ARGV[at + 9]))
  end
  words_out[i] = word
end
if ready then announce(now, spill_after()) end
for _, event in ipairs(events) do words_out[#words_out + 1] = event end
return words_out
