-- Gives a stream that broke its turn to go on elsewhere. If many replicas die together, their streams must not come back
-- all at once: as many as a third of the requests in flight may, then a sixth of them in each second, over all gateways.
--
-- KEYS
--   hash    active
--   string  resumptions: when this allowance is used up no more (ms)
-- ARGV
--   number  least_at_once, least_per_s: where few requests are in flight
-- Returns how long it waits for its turn (ms).

-- include time
-- include safe

local AT_ONCE, PER_S, LIVES_MS = 1 / 3, 1 / 6, 60000

local now, requests = now_ms(), 0
local active = redis.pcall('HVALS', active_key)
for i = 1, #active do
  requests = requests + sum_of(active[i])
end
local interval_ms = 1000 / math.max(least_per_s, requests * PER_S)
local at_once_ms = math.max(least_at_once, requests * AT_ONCE) * interval_ms
local told = redis.pcall('GET', resumptions_key)
local used_up = math.min(math.max(now, sum_of(type(told) == 'string' and told)), now + LIVES_MS)
redis.call('SET', resumptions_key, string.format('%d', used_up + interval_ms), 'PX', LIVES_MS)
return math.max(0, math.ceil(used_up - at_once_ms - now))
