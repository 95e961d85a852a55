-- Of a replica's keys, those whose last use lies in the future, as Redis' clock went back, count as used now: else they
-- were the last to be dropped, and their claims true, until the clock is there again.
--
-- KEYS[1] replicas   KEYS[2] held:<replica>   KEYS[3..] own:<key>
-- ARGV[1] replica   ARGV[2] ahead_ms: so far ahead no use is taken for one in the future
-- ARGV[3] how many came before these in this round   ARGV[4..] the keys (32 hex each), least recently used first, in the
-- order of KEYS[3..]
-- Returns the number of keys whose last use lay in the future.

-- include time
-- include load

local _, since_text = life_of(KEYS[1], ARGV[1])
local latest_ms = math.max(now_ms(), tonumber(since_text or 0))
local latest_text, found = string.format('%d', latest_ms), 0
for i = 3, #KEYS do
  local key = ARGV[i + 1]
  if tonumber(redis.call('ZSCORE', KEYS[2], key) or 0) > latest_ms + tonumber(ARGV[2]) then
    found = found + 1
    redis.call('ZADD', KEYS[2], string.format('%.3f', latest_ms + (tonumber(ARGV[3]) + found) / 1000), key)
    local record = redis.call('HGET', KEYS[i], ARGV[1])
    local head, used, rest = string.match(record or '', '^(%S+ %S+ %S+ %S+ %S+ )(%d+)( .+)')
    if used and tonumber(used) > latest_ms then
      redis.call('HSET', KEYS[i], ARGV[1], head .. latest_text .. rest)
    end
  end
end
return found
