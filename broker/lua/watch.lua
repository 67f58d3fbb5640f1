-- watch: the id of each task comes to a reply list when it gets its outcome. Changes no state of a task.
-- KEYS[1] rq:x:pool:<pool> HASH
-- ARGV    prefix, pool, reply list, n, then n ids
-- Returns n words: "settled" (nothing will come) | "watching" | "unknown"

local words_out = {}
for i = 1, tonumber(ARGV[4]) do
  local id = ARGV[4 + i]
  local key = job_key(id)
  local task = fields_of(id, 'status', 'x_out', 'x_reply')
  local word = 'watching'
  if not task[1] then word = 'unknown'
  elseif task[2] or task[1] == 'finished' or task[1] == 'failed' or task[1] == 'canceled' then word = 'settled'
  else
    local names = words(task[3] or '')
    if not set_of(names)[ARGV[3]] then
      names[#names + 1] = ARGV[3]
      call('HSET', key, 'x_reply', table.concat(names, ','))
    end
  end
  words_out[i] = word
end
return words_out
