-- After Redis' clock went back, the last use of some keys lies in the future. They count as used now; otherwise they
-- would be the last to be dropped, and their claims would stay valid, until the clock is there again.
--
-- KEYS
--   hash    replicas
--   zset    held:<replica>
--   hash    own:<key>...
-- ARGV
--   text    replica
--   number  ahead_ms: uses that are not further ahead are not taken for uses in the future
--   number  moved_before: how many keys this round has moved before these
--   text    keys...: least recently used first, in the order of own
-- Returns the number of keys whose last use lay in the future.

-- include time
-- include load

local _, since_text = life_of(replicas_key, replica)
local latest_ms = math.max(now_ms(), tonumber(since_text or 0))
local latest_text, found = string.format('%d', latest_ms), 0
for i = 1, #KEYS - OWN_OFFSET do
  local own_key, key = KEYS[OWN_OFFSET + i], ARGV[KEYS_OFFSET + i]
  if tonumber(redis.call('ZSCORE', held_key, key) or 0) > latest_ms + ahead_ms then
    found = found + 1
    redis.call('ZADD', held_key, string.format('%.3f', latest_ms + (moved_before + found) / 1000), key)
    local record = redis.call('HGET', own_key, replica)
    local head, used, rest = string.match(record or '', '^(%S+ %S+ %S+ %S+ %S+ )(%d+)( .+)')
    if used and tonumber(used) > latest_ms then
      redis.call('HSET', own_key, replica, head .. latest_text .. rest)
    end
  end
end
return found
