-- The breaker of an endpoint, for the verbs that end an attempt.
-- closed -> open (failures in a row, or at once) -> half_open (one probe) -> closed, or open for twice as long.
-- Each change of state starts a new epoch; a lease carries the epoch it was given in, so that what was sent before
-- the change neither extends nor closes the new state.

local function epoch_of(lease) return tonumber(string.match(lease, '^%d+%.(%d+)%.')) or -1 end

local function open_breaker(key, policy, now, again, reason)
  local cooldown = tonumber(policy[2] or '') or 60000
  if again then
    local last = tonumber(call('HGET', key, 'cooldown') or '') or cooldown
    cooldown = math.min(last * 2, tonumber(policy[3] or '') or 600000)
  end
  call('HSET', key, 'state', 'open', 'until', int(now + cooldown), 'cooldown', int(cooldown), 'reason', reason,
    'opened_at', int(now), 'good', 0)
  call('HINCRBY', key, 'epoch', 1)
  call('HINCRBY', key, 'opened', 1)
end

-- verdict: 'good', 'count' (the endpoint's fault), 'open' (at once: our key is wrong), 'ignore'.
local function breaker_result(endpoint, lease, verdict, now, reason)
  if verdict == 'ignore' then return end
  local key = endpoint_key(endpoint)
  local record = call('HMGET', key, 'state', 'epoch', 'fails', 'good')
  local state = record[1] or 'closed'
  if state == 'open' or epoch_of(lease) ~= (tonumber(record[2] or '') or 0) then return end
  if verdict == 'good' then
    if state == 'half_open' then
      local wanted = tonumber(call('HGET', K_POOL, 'half_open_successes') or '') or 1
      local good = (tonumber(record[4] or '') or 0) + 1
      if good >= wanted then
        call('HSET', key, 'state', 'closed', 'fails', 0, 'good', 0, 'until', 0, 'reason', '')
        call('HDEL', key, 'cooldown', 'probe')
        call('HINCRBY', key, 'epoch', 1)
      else
        call('HSET', key, 'good', good)
      end
    elseif record[3] and record[3] ~= '0' then
      call('HSET', key, 'fails', 0)
    end
    return
  end
  local policy = call('HMGET', K_POOL, 'failures', 'cooldown', 'cooldown_max')
  local fails = call('HINCRBY', key, 'fails', 1)
  if state == 'half_open' then
    open_breaker(key, policy, now, true, reason)
  elseif verdict == 'open' or fails >= (tonumber(policy[1] or '') or 5) then
    open_breaker(key, policy, now, false, reason)
  end
end

local function pause_endpoint(endpoint, now, pause)
  if pause <= 0 or not known(endpoint) then return end
  local key = endpoint_key(endpoint)
  local earlier = tonumber(call('HGET', key, 'pause') or '') or 0
  if now + pause > earlier then call('HSET', key, 'pause', int(now + pause)) end
end
