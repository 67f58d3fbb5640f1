-- purge: a task that has an outcome and does not run any more -> (nothing): with what RQ keeps of it, and its idempotency
-- key unless a later task has taken that.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, n, then n ids
-- Returns n words: "purged" | "unsettled" (it waits or runs; left alone) | "unknown" (no such task in this pool)

local ENDED = set_of({'finished', 'failed', 'stopped', 'canceled'})
local words_out = {}

local function remove(id, idem, digest)
  for _, registry in ipairs({K_FINISHED, K_FAILED, K_CANCELED}) do call('ZREM', registry, id) end
  if idem then
    local key = P .. ':x:idem:' .. pool .. ':' .. idem
    if call('GET', key) == id .. ' ' .. (digest or '') then call('DEL', key) end
  end
  call('UNLINK', job_key(id), P .. ':results:' .. id)
end

for i = 1, tonumber(ARGV[3]) do
  local id = ARGV[3 + i]
  local task = fields_of(id, 'status', 'x_out', 'x_lease', 'origin', 'x_idem', 'x_dig')
  local word = 'unknown'
  if task[4] == pool and task[1] then
    word = (task[2] or ENDED[task[1]]) and not task[3] and 'purged' or 'unsettled'
  end
  if word == 'purged' or not task[1] and (task[4] or pool) == pool then remove(id, task[5], task[6]) end
  words_out[i] = word
end
return words_out
