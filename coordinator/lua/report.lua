-- The shared circuit breaker of a replica: what one gateway learns from a request, all of them know.
-- A record is "<failures> <open_until_ms> <1 while a probe is out, else 0>"; a replica that never failed has none.
-- Closed (open_until_ms is 0), it counts: behind these three is the window, " <since_ms>:<failures>:<successes>" for each
-- fifth of it in which something failed, and <failures> are those of the window. Enough failures that are a large enough
-- share of all attempts in the window open it. Open, it has no window, and <failures> grows by one with each failed probe;
-- only a probe's outcome counts: requests sent before it opened tell nothing new.
-- Gateways that count failures in a row, from before there was a window, share these records: they read the three first
-- fields and write no others. The failures of a closed record without a window count as of now.
--
-- KEYS[1] replicas   KEYS[2] breakers
-- ARGV[1] replica   ARGV[2] incarnation   ARGV[3] "failure" | "success"   ARGV[4] failures: the least that open it
-- ARGV[5] error_rate: the least share of all attempts in the window that opens it (0..1)   ARGV[6] window_ms
-- ARGV[7] open_ms (doubles with every failed probe, at most 12 times as long)
-- ARGV[8] attempts there that ended well and that this gateway has not told of yet, within its last window_ms
-- Returns the open_until_ms that now holds (0: closed), or -1 when the incarnation is not the current one.

local SLICES = 5

-- include time
-- include safe

check_hashes(KEYS[1], KEYS[2])
local record = redis.call('HGET', KEYS[1], ARGV[1])
if not record or string.match(record, '^%S+') ~= ARGV[2] then
  return -1
end
local least, error_rate, window_ms = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local open_ms, good, now = tonumber(ARGV[7]), tonumber(ARGV[8]), now_ms()
local failures, open_until, probing, window =
  string.match(redis.call('HGET', KEYS[2], ARGV[1]) or '', '^(%d+) (%d+) (%d)(.*)')
failures, open_until = tonumber(failures or 0), tonumber(open_until or 0)

local function write(count, until_ms, rest)
  redis.call('HSET', KEYS[2], ARGV[1], string.format('%d %d 0', count, until_ms) .. rest)
  return until_ms
end

if open_until > 0 then
  if probing == '0' then
    return open_until
  end
  if ARGV[3] == 'success' then
    redis.call('HDEL', KEYS[2], ARGV[1])
    return 0
  end
  return write(failures + 1, now + open_ms * math.min(2 ^ math.max(0, failures + 1 - least), 12), '')
end
if ARGV[3] == 'success' then
  return 0
end

local bad, slices = 1, {}
if window == '' then
  bad = bad + failures
end
local newest = { now, bad, good }
for since, failed, ended_well in string.gmatch(window or '', ' (%d+):(%d+):(%d+)') do
  local slice = { math.min(tonumber(since), now), tonumber(failed), tonumber(ended_well) } -- the clock may have gone back
  if now - slice[1] < window_ms then
    bad, good = bad + slice[2], good + slice[3]
    slices[#slices + 1] = slice
  end
end
if bad >= least and bad >= error_rate * (bad + good) then
  return write(least, now + open_ms, '')
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
return write(bad, 0, rest)
