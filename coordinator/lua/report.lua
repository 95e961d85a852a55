-- The shared circuit breaker of a replica: what one gateway learns from a request, all gateways know. For its record see
-- coordinator/README.md. While it is open only a probe's outcome counts: requests sent before it opened tell nothing new.
--
-- KEYS
--   hash    replicas, breakers
-- ARGV
--   text    replica, incarnation
--   text    outcome: "failure" | "success"
--   number  min_failures, error_rate, window_ms, open_ms: see coordinator/breaker.py; open_ms doubles with every failed
--             probe, up to 12 times as long
--   number  successes: attempts there within the last window_ms that succeeded and are not reported yet
-- Returns the open_until_ms that now holds (0: closed), or -1 if the incarnation is not the current one.

local SLICES = 5

-- include time
-- include subsets

check_hashes(replicas_key, breakers_key)
local record = redis.call('HGET', replicas_key, replica)
if not record or string.match(record, '^%S+') ~= incarnation then
  return -1
end
local good, now = successes, now_ms()
local failures, open_until, probing, window =
  string.match(redis.call('HGET', breakers_key, replica) or '', '^(%d+) (%d+) (%d)(.*)')
failures, open_until = tonumber(failures or 0), tonumber(open_until or 0)

local function take_place()
  stand(base_of(replicas_key), replica, now, MAX_OPENINGS * open_ms)
end

local function record_as(count, until_ms, rest)
  redis.call('HSET', breakers_key, replica, string.format('%d %d 0', count, until_ms) .. rest)
  if until_ms > 0 then
    take_place()
  end
  return until_ms
end

if open_until > 0 then
  if probing == '0' then
    return open_until
  end
  if outcome == 'success' then
    redis.call('HDEL', breakers_key, replica)
    take_place()
    return 0
  end
  return record_as(failures + 1, now + open_ms * math.min(2 ^ math.max(0, failures + 1 - min_failures), 12), '')
end
if outcome == 'success' then
  return 0
end

local bad, slices = 1, {}
local newest = { now, bad, good }
for since, failed, ended_well in string.gmatch(window or '', ' (%d+):(%d+):(%d+)') do
  -- `since` lies in the future if the clock went back.
  local slice = { math.min(tonumber(since), now), tonumber(failed), tonumber(ended_well) }
  if now - slice[1] < window_ms then
    bad, good = bad + slice[2], good + slice[3]
    slices[#slices + 1] = slice
  end
end
if bad >= min_failures and bad >= error_rate * (bad + good) then
  return record_as(min_failures, now + open_ms, '')
end
local last = slices[#slices]
if last and now - last[1] < window_ms / SLICES then
  last[2], last[3] = last[2] + newest[2], last[3] + newest[3]
else
  slices[#slices + 1] = newest
end
local rest = ''
for _, slice in ipairs(slices) do
  rest = rest .. string.format(' %d:%d:%d', slice[1], slice[2], slice[3])
end
return record_as(bad, 0, rest)
