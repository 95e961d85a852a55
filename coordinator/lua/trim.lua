-- Drops the keys that a replica used least recently: those last used before a time, those for which its cache has no
-- room, and all if the replica was forgotten. One call drops a piece of them. The script makes the names
-- of own:<key> from its KEYS.
--
-- KEYS
--   hash    replicas, owned_tokens, forgotten
--   zset    held:<replica>
-- ARGV
--   text    replica
--   number  before_ms: keys last used before it go
--   flag    to_capacity: whether keys go for which the cache has no room
--   number  max_keys: the room of a cache whose capacity is not known
--   number  at_most: keys to drop
--   flag    only_drained: drop none if the replica is neither drained nor asleep any more
-- Returns the number of keys dropped; 0 if there are no more, or while the replica's record cannot be read.

-- include remove

check_hashes(replicas_key, forgotten_key)
local record = redis.call('HGET', replicas_key, replica)
local count, excess = redis.call('ZCARD', held_key), 0
local is_forgotten = redis.call('HGET', forgotten_key, replica)
local state = string.match(record or '', '^%S+ (%S+)')
if only_drained and state and state ~= 'draining' and state ~= 'asleep' then
  return 0
end
if not record and not is_forgotten then
  return 0 -- somebody deleted the record: gateways that know it write it again
elseif not record then
  before_ms = math.huge
end
if is_forgotten and (record or count <= at_most) then -- it is registered again, or this call drops the last keys
  redis.call('HDEL', forgotten_key, replica)
end
if record and to_capacity then
  -- About how many keys the cache has no room for, by their mean size.
  local capacity = tonumber(string.match(record, '^%S+ %S+ (%d+) ')) or 0
  local owned = sum_of(redis.call('HGET', owned_tokens_key, replica))
  if capacity == 0 then
    excess = math.max(0, count - max_keys)
  elseif owned > capacity then
    excess = math.max(1, math.floor(count * (owned - capacity) / owned))
  end
end

local oldest = redis.call('ZRANGE', held_key, 0, at_most - 1, 'WITHSCORES')
local keys = {}
for i = 1, #oldest, 2 do
  if (i + 1) / 2 > excess and tonumber(oldest[i + 1]) >= before_ms then
    break
  end
  keys[#keys + 1] = oldest[i]
end
return remove_keys(keys, function() return true end)
