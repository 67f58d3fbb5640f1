-- `max_concurrent: auto`: finds an endpoint's capacity by the gradient of its throughput, and follows it.
-- With all slots in use throughput is slots / latency (Little), so more slots that only lengthen the latency gain nothing.
-- Per step: let one round of requests pass, measure two rounds, decide. Grow by doubling until less than half of the
-- added slots show in the throughput; then hold, and look once in a while whether more or fewer would do.
-- A 429 takes back what was added last, else 15 %, and is remembered: for two minutes no step goes there again.
-- Only rounds in which the slots were really used count.

local LOOK_EVERY = 8 -- rounds of holding between two looks
local REMEMBER = 120000 -- ms that a limit counts which the endpoint told us of

local function clamp(record, slots) return math.max(record.floor, math.min(record.most, math.floor(slots))) end

local function set_slots(key, record, slots, step)
  call('HSET', key, 'cap', int(clamp(record, slots)), 'a_step', step, 'a_phase', 'settle', 'a_n', 0, 'a_low', 1000000)
end

local function read_adaptive(key, now)
  local r = call('HMGET', key, 'auto', 'cap', 'floor', 'ceiling', 'a_phase', 'a_n', 'a_at', 'a_low', 'a_rate', 'a_slots',
    'a_step', 'a_rounds', 'a_limit', 'a_cut')
  if r[1] ~= '1' then return nil end
  local ceiling, limit, cut = tonumber(r[4] or '') or 256, tonumber(r[13] or ''), tonumber(r[14] or '') or 0
  local most = (limit and now - cut < REMEMBER) and math.min(ceiling, limit - 1) or ceiling
  return {
    cap = tonumber(r[2] or '') or 1, floor = tonumber(r[3] or '') or 1, most = most, cut = cut,
    phase = r[5] or 'settle', n = tonumber(r[6] or '') or 0, at = tonumber(r[7] or '') or 0,
    low = tonumber(r[8] or '') or 1000000, rate = tonumber(r[9] or ''), slots = tonumber(r[10] or ''),
    step = r[11] or 'grow', rounds = tonumber(r[12] or '') or 0,
  }
end

-- Six digits, wherever the point stands: with six places after it a slow endpoint's throughput is 0, and every step pays.
local function keep(key, record, rate)
  call('HSET', key, 'a_rate', string.format('%.6g', rate), 'a_slots', int(record.cap))
end

local function again(key, step, rounds)
  call('HSET', key, 'a_step', step, 'a_phase', 'measure', 'a_n', 0, 'a_at', 0, 'a_low', 1000000, 'a_rounds', int(rounds))
end

local function pays(record, rate)
  return rate >= record.rate * (1 + 0.5 * (record.cap / record.slots - 1))
end

local function grow(key, record, rate)
  if not record.rate or pays(record, rate) then
    keep(key, record, rate)
    if record.cap >= record.most then again(key, 'hold', 0)
    else set_slots(key, record, record.cap * 2, 'grow') end
    return
  end
  local best = math.max(record.slots, math.ceil(record.slots * math.max(1, rate / record.rate) - 0.2))
  call('HDEL', key, 'a_rate')
  call('HSET', key, 'a_rounds', 0)
  set_slots(key, record, math.min(best, record.cap), 'hold')
end

local function hold(key, record, rate)
  if record.rate and rate < record.rate * 0.7 and record.slots == record.cap then
    keep(key, record, rate)
    call('HSET', key, 'a_rounds', 0)
    set_slots(key, record, math.ceil(record.cap * rate / record.rate), 'hold')
    call('HDEL', key, 'a_rate')
    return
  end
  -- Slowly, so that a look compares with what was usual and not with one lucky round.
  if record.rate and record.slots == record.cap then rate = record.rate * 0.7 + rate * 0.3 end
  keep(key, record, rate)
  local rounds = record.rounds + 1
  if rounds % (2 * LOOK_EVERY) == LOOK_EVERY and record.cap < record.most then
    call('HSET', key, 'a_rounds', int(rounds))
    set_slots(key, record, math.ceil(record.cap * 1.25), 'up')
  elseif rounds % (2 * LOOK_EVERY) == 0 and record.cap > record.floor then
    call('HSET', key, 'a_rounds', int(rounds))
    set_slots(key, record, math.min(record.cap - 1, record.cap * 0.8), 'down')
  else
    again(key, 'hold', rounds)
  end
end

local function decide_slots(key, record, rate)
  if record.step == 'grow' then grow(key, record, rate)
  elseif record.step == 'hold' then hold(key, record, rate)
  elseif record.step == 'up' then
    if pays(record, rate) then
      keep(key, record, rate)
      set_slots(key, record, record.cap * 2, 'grow')
    else
      set_slots(key, record, record.slots, 'hold')
    end
  else -- down: fewer slots that do as much are better, they keep the latency low
    if rate >= record.rate * 0.97 then
      keep(key, record, rate)
      set_slots(key, record, record.cap, 'hold')
    else
      set_slots(key, record, record.slots, 'hold')
    end
  end
end

-- `count` attempts were answered while `in_flight` (them included) were out.
local function adapt(endpoint, now, count, in_flight)
  local key = endpoint_key(endpoint)
  local record = read_adaptive(key, now)
  if not record then return end
  record.n, record.low = record.n + count, math.min(record.low, in_flight)
  if record.phase == 'settle' then
    if record.n >= record.cap then
      call('HSET', key, 'a_phase', 'measure', 'a_n', 0, 'a_at', int(now), 'a_low', 1000000)
    else
      call('HSET', key, 'a_n', int(record.n), 'a_low', int(record.low))
    end
  elseif record.at == 0 then
    call('HSET', key, 'a_n', 0, 'a_at', int(now), 'a_low', 1000000)
  elseif record.n >= math.max(2 * record.cap, 6) and now > record.at then
    if record.low >= 0.7 * record.cap then decide_slots(key, record, record.n / (now - record.at))
    else again(key, record.step, record.rounds) end
  else
    call('HSET', key, 'a_n', int(record.n), 'a_low', int(record.low))
  end
end

-- The endpoint said that it is too much. At most once a second: the requests of one overload are one message.
local function adapt_down(endpoint, now)
  local key = endpoint_key(endpoint)
  local record = read_adaptive(key, now)
  if not record or now - record.cut < 1000 then return end
  call('HSET', key, 'a_cut', int(now), 'a_limit', int(record.cap), 'a_rounds', 0)
  if record.rate and record.slots and record.slots < record.cap then
    set_slots(key, record, record.slots, 'hold')
  else
    call('HDEL', key, 'a_rate')
    set_slots(key, record, math.min(record.cap - 1, record.cap * 0.85), 'hold')
  end
end
