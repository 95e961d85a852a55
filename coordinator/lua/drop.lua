-- Drops a replica's ownership of keys that its cache no longer holds: the least recently used beyond its capacity,
-- those of an older incarnation, and those that a cache miss has disproved.
--
-- KEYS
--   hash    replicas, owned_tokens
--   zset    held:<replica>
--   hash    own:<key>...
-- ARGV
--   text    replica
--   number  before_ms: keys that were used at this time or later are kept
--   text    keys...: in the order of own
-- Returns the number of keys dropped; 0 while the replica's record cannot be read.

-- include load
-- include owned

local incarnation, since_ms, is_unreadable = life_of(replicas_key, replica)
if is_unreadable then
  return 0
end
check_hashes(owned_tokens_key)
redis.call('ZCARD', held_key)
local dropped, freed_tokens = 0, 0
for i = 1, #KEYS - OWN_OFFSET do
  local own_key, key = KEYS[OWN_OFFSET + i], ARGV[KEYS_OFFSET + i]
  local used_ms = redis.call('ZSCORE', held_key, key)
  if used_ms and tonumber(used_ms) < before_ms then
    local record = field_of(own_key, replica)
    if record then
      redis.call('HDEL', own_key, replica)
      freed_tokens = freed_tokens + counted_span(record, incarnation, since_ms, owned_tokens_key, replica)
    end
    redis.call('ZREM', held_key, key)
    dropped = dropped + 1
  end
end
if freed_tokens > 0 then
  add(owned_tokens_key, replica, -freed_tokens)
end
return dropped
