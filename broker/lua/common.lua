-- What every script shares. It stands before each verb; a verb starts where this ends.
-- KEYS[1] rq:x:pool:<pool>   ARGV[1] key prefix   ARGV[2] pool   then the verb's own.
-- Times are whole milliseconds by the server's clock, written with %d: tostring() loses digits.

local P, pool = ARGV[1], ARGV[2]
local call = redis.call
local K_POOL = P .. ':x:pool:' .. pool
local K_QUEUE = P .. ':queue:' .. pool
local K_QUEUES = P .. ':queues'
local K_LISTS = P .. ':x:lists:' .. pool
local K_ENDPOINTS = P .. ':x:endpoints:' .. pool
local K_WAITING = P .. ':x:waiting:' .. pool
local K_DEADLINES = P .. ':x:deadlines:' .. pool
local K_GHOSTS = P .. ':x:ghosts:' .. pool
local K_WIP = P .. ':wip:' .. pool
local K_SCHEDULED = P .. ':scheduled:' .. pool
local K_FINISHED = P .. ':finished:' .. pool
local K_FAILED = P .. ':failed:' .. pool
local K_CANCELED = P .. ':canceled:' .. pool

local IDEM_TTL = 14 * 86400000 -- of the idempotency key of a task without outcome

local function job_key(id) return P .. ':job:' .. id end
-- Fields of a task. A key of its name that is no hash, which a stranger must have put there, has none.
local function fields_of(id, ...)
  local values = redis.pcall('HMGET', job_key(id), ...)
  return values.err and {} or values
end

-- To count a task's fields is cheaper than to look for a dozen that are not there: as enqueue wrote it, with no options,
-- it has PLAIN of them, which nobody takes away; in its first lease it has LEASED. One more with a digest.
-- Scripts that count otherwise, of another version, would take a task with one option for a plain one: a change of these
-- numbers is for the changelog.
local PLAIN, LEASED = 8, 14
local function has_only(id, fields)
  local key = job_key(id)
  local found = call('HLEN', key)
  return found == fields or found == fields + 1 and call('HEXISTS', key, 'x_dig') == 1
end

local slots_keys = {}
local function slots_key(endpoint)
  local key = slots_keys[endpoint]
  if not key then
    key = P .. ':x:slots:' .. pool .. ':' .. endpoint
    slots_keys[endpoint] = key
  end
  return key
end
local function endpoint_key(endpoint) return P .. ':x:endpoint:' .. pool .. ':' .. endpoint end
-- An endpoint that left the configuration has no hash; a late call about it must not bring one back.
local function known(endpoint) return call('EXISTS', endpoint_key(endpoint)) == 1 end

-- Redis out of memory refuses a script whose first write may grow; after this one all are allowed, so that consuming
-- goes on, and frees memory, while enqueue is refused.
local function write_when_full() call('PERSIST', K_POOL) end

-- Whether an endpoint that recovers is given its slots slowly.
local function slow_start() return call('HGET', K_POOL, 'slow_start') == '1' end

-- Written once: a call writes the same few numbers for each of its tasks.
local written = {}
local function int(number)
  local text = written[number]
  if not text then
    text = string.format('%d', number)
    written[number] = text
  end
  return text
end

-- A number that strangers may have written: what is none, or none that a count can be, is `other`, or 0.
local function whole_of(text, other)
  local number = tonumber(text or '')
  if number and number > -1e15 and number < 1e15 then return number end -- nan is neither
  return other or 0
end

local function server_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- RQ scores its registries in Unix seconds.
local scored = {}
local function seconds(ms)
  local text = scored[ms]
  if not text then
    text = string.format('%.3f', ms / 1000)
    scored[ms] = text
  end
  return text
end

-- RQ's text of a time, by Howard Hinnant's days-to-date algorithm: a script has no calendar.
local dated = {}
local function date_of(ms)
  local floor, days = math.floor, math.floor(ms / 86400000)
  local left, shifted = ms - days * 86400000, days + 719468
  local era = floor(shifted / 146097)
  local of_era = shifted - era * 146097
  local year = floor((of_era - floor(of_era / 1460) + floor(of_era / 36524) - floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + floor(year / 4) - floor(year / 100))
  local month = floor((5 * of_year + 2) / 153)
  local day = of_year - floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  year = year + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%03dZ', year, month, day, floor(left / 3600000),
    floor(left / 60000) % 60, floor(left / 1000) % 60, left % 1000)
end
local function date_text(ms)
  local text = dated[ms]
  if not text then
    text = date_of(ms)
    dated[ms] = text
  end
  return text
end

local function words(text)
  local found = {}
  for word in string.gmatch(text or '', '[^,]+') do found[#found + 1] = word end
  return found
end

local function set_of(list)
  local set = {}
  for _, item in ipairs(list) do set[item] = true end
  return set
end
