-- Drops a replica's ownership of keys that its cache no longer holds: the least recently used beyond its
-- capacity, what an older incarnation left behind, what a miss has disproved.
--
-- KEYS[1] replicas   KEYS[2] owned_tokens   KEYS[3] held:<replica>   KEYS[4..] own:<key>
-- ARGV[1] replica   ARGV[2] before_ms: only keys last used before it (a touch in between wins)
-- ARGV[3..] the keys (32 hex each), in the order of KEYS[4..]
-- Returns the number of keys dropped; none while the replica's record cannot be read.

-- include load
-- include owned

local incarnation, since_ms, is_unreadable = life_of(KEYS[1], ARGV[1])
if is_unreadable then
  return 0
end
check_hashes(KEYS[2])
redis.call('ZCARD', KEYS[3])
local before_ms = tonumber(ARGV[2])
local dropped, freed_tokens = 0, 0
for i = 4, #KEYS do
  local key = ARGV[i - 1]
  local used_ms = redis.call('ZSCORE', KEYS[3], key)
  if used_ms and tonumber(used_ms) < before_ms then
    local record = field_of(KEYS[i], ARGV[1])
    if record then
      redis.call('HDEL', KEYS[i], ARGV[1])
      freed_tokens = freed_tokens + counted_span(record, incarnation, since_ms, KEYS[2], ARGV[1])
    end
    redis.call('ZREM', KEYS[3], key)
    dropped = dropped + 1
  end
end
if freed_tokens > 0 then
  add(KEYS[2], ARGV[1], -freed_tokens)
end
return dropped
