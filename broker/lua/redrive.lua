-- redrive: dead | poison | expired | canceled -> queued, with its attempts, exclusions and deadline cleared; also what a
-- stock RQ worker failed or RQ itself canceled, which has no outcome of ours.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, n, then n ids
-- Returns n words: "queued" | "unsettled" (waits or runs) | "done" (its outcome is ok) | "unknown"
-- needs: idem, ready, select

local now = server_ms()
local words_out, queued = {}, false
local OF_RQ = {finished = 'ok', failed = 'dead', stopped = 'dead', canceled = 'canceled'}

for i = 1, tonumber(ARGV[3]) do
  local id = ARGV[3 + i]
  local key = job_key(id)
  local task = fields_of(id, 'x_out', 'origin', 'status', 'x_lease')
  local word = 'unknown'
  if task[3] and task[2] == pool then
    local outcome = task[1] or OF_RQ[task[3]]
    if outcome == 'ok' then word = 'done'
    elseif not outcome or task[4] then word = 'unsettled'
    else
      call('ZREM', K_FAILED, id)
      call('ZREM', K_CANCELED, id)
      call('ZREM', K_DEADLINES, id)
      call('HDEL', key, 'x_out', 'x_why', 'x_try', 'x_excl', 'x_del', 'x_sus', 'x_dl', 'x_ans', 'exc_info', 'ended_at')
      call('PERSIST', key)
      hold_idem(id)
      make_ready(id, now)
      call('HINCRBY', K_POOL, 'n_redriven', 1)
      word, queued = 'queued', true
    end
  end
  words_out[i] = word
end
if queued then announce(now, spill_after()) end
return words_out
