-- Outcomes: once a task has one it keeps it, until somebody redrives it.
-- needs: sums

-- What an outcome depends on.
local function read_ending(id)
  local found = fields_of(id, 'status', 'x_lease', 'x_done', 'x_out', 'x_try', 'x_dl', 'x_reply', 'x_idem', 'x_born',
    'result_ttl', 'failure_ttl', 'x_run')
  return {
    status = found[1], lease = found[2], done = found[3], outcome = found[4], try = found[5], deadline = found[6],
    reply = found[7], idem = found[8], born = found[9], result_ttl = found[10], failure_ttl = found[11], run = found[12],
  }
end

local REGISTRIES = {ok = K_FINISHED, dead = K_FAILED, poison = K_FAILED, canceled = K_CANCELED}

-- any -> an outcome. Fields is a flat list for the hash; task is what read_ending gives. The caller has freed the slot
-- already, and writes the sums. ttl in milliseconds; a task of a plain RQ producer keeps the TTL its producer asked for.
-- Returns how long it ran, ms.
local function conclude_in(sums, id, task, outcome, status, now, ttl, fields)
  local key = job_key(id)
  if task.deadline then call('ZREM', K_DEADLINES, id) end
  if not task.born then
    local own = tonumber((outcome == 'ok' and task.result_ttl or outcome ~= 'ok' and task.failure_ttl) or '')
    if own and own ~= 0 then ttl = own * 1000 end
    if own == 0 and outcome == 'ok' then ttl = 1000 end
  end
  local n = #fields
  fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'status', status, 'x_out', outcome
  fields[n + 5], fields[n + 6] = 'ended_at', date_text(now)
  if outcome == 'ok' then call('HDEL', key, 'x_lease', 'x_ep', 'x_run', 'x_fence') -- which x_done has
  else call('HDEL', key, 'x_lease', 'x_ep', 'x_run') end
  call('HSET', key, unpack(fields))
  if ttl > 0 then call('PEXPIRE', key, int(ttl)) else call('PERSIST', key) end
  if REGISTRIES[outcome] then member(sums, REGISTRIES[outcome], ttl > 0 and seconds(now + ttl) or '+inf', id) end
  if task.reply then
    for _, name in ipairs(words(task.reply)) do
      local ids = sums.replies[name] or {}
      sums.replies[name] = ids
      ids[#ids + 1] = id
    end
  end
  if task.idem and task.idem ~= '' then
    call('PEXPIRE', P .. ':x:idem:' .. pool .. ':' .. task.idem, int(ttl > 0 and ttl or 86400000))
  end
  sums.counts['n_' .. outcome] = (sums.counts['n_' .. outcome] or 0) + 1
  return now - (tonumber(task.run or '') or now)
end

-- The same for one task.
local function conclude(id, outcome, status, now, ttl, fields)
  local sums = new_sums()
  local ran = conclude_in(sums, id, read_ending(id), outcome, status, now, ttl, fields)
  write_sums(sums)
  return ran
end

-- queued, scheduled -> expired.
local function expire_waiting(id, now, ttl)
  local why = 'expired: its deadline passed while it waited'
  conclude(id, 'expired', 'failed', now, ttl, {'x_why', why, 'exc_info', why})
end
