-- The breaker of an endpoint, for the verbs that end an attempt.
-- closed -> open (failures in a row, a high failure rate, or at once) -> half_open (one probe) -> closed, or open for
-- twice as long. Closed again it is given slots slowly: 1, 2, 4 ...
-- Each change of state starts a new epoch; a lease carries the epoch it was given in, so that what was sent before
-- the change neither extends nor closes the new state.

local events = {} -- what people are told: "opened <endpoint> <cooldown ms> <reason>", "closed <endpoint>"

-- What is asked first of an endpoint when an attempt on it ended.
local OF_BREAKER = {'state', 'fails', 'good', 'ramp', 'ramp_ok', 'cap', 'epoch'}

local function epoch_of(lease) return tonumber(string.match(lease, '^%d+%.(%d+)%.')) or -1 end

-- Whether what came of the lease says something of the endpoint as it is now. `record`: OF_BREAKER.
local function counts(record, lease)
  return record[1] ~= 'open' and epoch_of(lease) == (tonumber(record[7] or '') or 0)
end

local function open_breaker(endpoint, policy, now, again, reason)
  local key = endpoint_key(endpoint)
  local cooldown = tonumber(policy[2] or '') or 60000
  if again then
    local last = tonumber(call('HGET', key, 'cooldown') or '') or cooldown
    cooldown = math.min(last * 2, tonumber(policy[3] or '') or 600000)
  end
  call('HSET', key, 'state', 'open', 'until', int(now + cooldown), 'cooldown', int(cooldown), 'reason', reason,
    'opened_at', int(now), 'good', 0)
  call('HDEL', key, 'rate_at', 'rate_n', 'rate_f', 'ramp', 'ramp_ok')
  call('HINCRBY', key, 'epoch', 1)
  call('HINCRBY', key, 'opened', 1)
  events[#events + 1] = 'opened ' .. endpoint .. ' ' .. int(cooldown) .. ' ' .. reason
end

local function close_breaker(endpoint)
  local key = endpoint_key(endpoint)
  call('HSET', key, 'state', 'closed', 'fails', 0, 'good', 0, 'until', 0, 'reason', '')
  if slow_start() then call('HSET', key, 'ramp', 1, 'ramp_ok', 0) end
  call('HDEL', key, 'cooldown', 'probe')
  call('HINCRBY', key, 'epoch', 1)
  events[#events + 1] = 'closed ' .. endpoint
end

-- Attempts and failures of the last one to two windows, as the endpoint's hash has them ("<window before> <this one>"),
-- and what a batch adds. Returns the fields to write, and both counts with the batch in them.
local RATE = {'rate_at', 'rate_n', 'rate_f'}

local function rate_with(record_at, record_n, record_f, at, attempts, failures)
  local last = tonumber(record_at or '') or -1
  local old_n, old_f = 0, 0
  if last == at then
    local before, this = string.match(record_n or '', '^(%d+) (%d+)$')
    local before_f, this_f = string.match(record_f or '', '^(%d+) (%d+)$')
    old_n, old_f = tonumber(before) or 0, tonumber(before_f) or 0
    attempts, failures = attempts + (tonumber(this) or 0), failures + (tonumber(this_f) or 0)
  elseif last == at - 1 then
    old_n = tonumber(string.match(record_n or '', ' (%d+)$')) or 0
    old_f = tonumber(string.match(record_f or '', ' (%d+)$')) or 0
  end
  local fields = {'rate_at', int(at), 'rate_n', int(old_n) .. ' ' .. int(attempts), 'rate_f', int(old_f) .. ' ' .. int(failures)}
  return fields, old_n + attempts, old_f + failures
end

local function count_rate(key, now, window, attempts, failures)
  local record = call('HMGET', key, unpack(RATE))
  local fields, n, f = rate_with(record[1], record[2], record[3], math.floor(now / window), attempts, failures)
  call('HSET', key, unpack(fields))
  return n, f
end

-- After a recovery an endpoint gets one slot, then twice as many each time as many attempts as that have succeeded.
local function ramp_up(key, cap, ramp, ramp_ok, count)
  ramp_ok = ramp_ok + count
  while ramp_ok >= ramp and ramp < cap do
    ramp_ok = ramp_ok - ramp
    ramp = ramp * 2
  end
  if ramp >= cap then call('HDEL', key, 'ramp', 'ramp_ok')
  else call('HSET', key, 'ramp', int(ramp), 'ramp_ok', int(ramp_ok)) end
end

local window_of_rate -- ms, 0 for none; asked for once a call
local function rate_window()
  window_of_rate = window_of_rate or tonumber(call('HGET', K_POOL, 'rate_window') or '') or 0
  return window_of_rate
end

-- What `count` successes change, but for the rate. `record`: OF_BREAKER.
local function good_results(endpoint, key, record, count)
  if record[1] == 'half_open' then
    local wanted = tonumber(call('HGET', K_POOL, 'half_open_successes') or '') or 1
    local good = (tonumber(record[3] or '') or 0) + count
    if good >= wanted then close_breaker(endpoint) else call('HSET', key, 'good', int(good)) end
    return
  end
  if record[2] and record[2] ~= '0' then call('HSET', key, 'fails', 0) end
  if record[4] then
    ramp_up(key, tonumber(record[6] or '') or 1, tonumber(record[4]), tonumber(record[5] or '') or 0, count)
  end
end

-- verdict: 'good', 'count' (the endpoint's fault), 'open' (at once: our key is wrong), 'ignore'.
local function breaker_result(endpoint, lease, verdict, now, reason)
  if verdict == 'ignore' then return end
  local key = endpoint_key(endpoint)
  local record = call('HMGET', key, unpack(OF_BREAKER))
  local state = record[1] or 'closed'
  if not counts(record, lease) then return end
  if verdict == 'good' then
    good_results(endpoint, key, record, 1)
    if state ~= 'half_open' and rate_window() > 0 then count_rate(key, now, rate_window(), 1, 0) end
    return
  end
  local policy = call('HMGET', K_POOL, 'failures', 'cooldown', 'cooldown_max', 'rate_window', 'failure_rate',
    'minimum_volume')
  local fails = call('HINCRBY', key, 'fails', 1)
  if state == 'half_open' then
    open_breaker(endpoint, policy, now, true, 'its probe failed: ' .. reason)
    return
  end
  local window, too_many = tonumber(policy[4] or '') or 0, nil
  if window > 0 then
    local attempts, failures = count_rate(key, now, window, 1, 1)
    if attempts >= (tonumber(policy[6] or '') or 20) and failures * 100 >= attempts * (tonumber(policy[5] or '') or 50) then
      too_many = int(failures) .. ' of ' .. int(attempts) .. ' attempts failed; the last: ' .. reason
    end
  end
  if verdict == 'open' then
    open_breaker(endpoint, policy, now, false, reason)
  elseif fails >= (tonumber(policy[1] or '') or 5) then
    open_breaker(endpoint, policy, now, false, int(fails) .. ' failures in a row; the last: ' .. reason)
  elseif too_many then
    open_breaker(endpoint, policy, now, false, too_many)
  end
end

local function pause_endpoint(endpoint, now, pause)
  if pause <= 0 or not known(endpoint) then return end
  local key = endpoint_key(endpoint)
  local earlier = tonumber(call('HGET', key, 'pause') or '') or 0
  if now + pause > earlier then call('HSET', key, 'pause', int(now + pause)) end
end
