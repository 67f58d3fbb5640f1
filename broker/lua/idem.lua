-- Idempotency keys of tasks without outcome.

-- A task that waits again holds its idempotency key as a new one does, unless a later task has taken it.
local function hold_idem(id)
  local task = fields_of(id, 'x_idem', 'x_dig')
  if not task[1] then return end
  local key, mine = P .. ':x:idem:' .. pool .. ':' .. task[1], id .. ' ' .. (task[2] or '')
  local found = call('GET', key)
  if not found or found == mine then call('SET', key, mine, 'PX', IDEM_TTL) end
end
