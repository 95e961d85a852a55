-- After Redis' clock went back, the last use of some keys lies in the future. They count as used now; otherwise they
-- would be the last to be dropped, and their claims would stay valid, until the clock is there again. One call moves a
-- piece of them, the least recently used first. The script makes the names of own:<key> from its KEYS.
--
-- KEYS
--   hash    replicas
--   zset    held:<replica>
-- ARGV
--   text    replica
--   number  ahead_ms: uses that are not further ahead are not taken for uses in the future
--   number  moved_before: how many keys this round has moved before these
--   number  at_most: keys to move
-- Returns the number of keys moved; 0 if there are no more.

-- include time
-- include load

local own_base = string.match(replicas_key, '^(.*:)[^:]+$') .. 'own:'
local _, since_text = life_of(replicas_key, replica)
local latest_ms = math.max(now_ms(), tonumber(since_text or 0))
local latest_text = string.format('%d', latest_ms)
local ahead = string.format('(%d', latest_ms + ahead_ms)
local keys = redis.call('ZRANGEBYSCORE', held_key, ahead, '+inf', 'LIMIT', 0, at_most)
for i = 1, #keys do
  local own_key = own_base .. keys[i]
  redis.call('ZADD', held_key, string.format('%.3f', latest_ms + (moved_before + i) / 1000), keys[i])
  local head, used, rest = string.match(field_of(own_key, replica) or '', '^(%S+ %S+ %S+ %S+ %S+ )(%d+)( .+)')
  if used and tonumber(used) > latest_ms then
    redis.call('HSET', own_key, replica, head .. latest_text .. rest)
  end
end
return #keys
