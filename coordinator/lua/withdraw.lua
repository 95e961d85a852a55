-- Takes back the claims that one reservation made: its request failed before the first token, so nothing was computed.
-- A claim that a later reservation has renewed is kept.
--
-- KEYS
--   hash    replicas, owned_tokens
--   zset    held:<replica>
--   hash    own:<key>...
-- ARGV
--   text    replica, reservation
--   text    keys...: in the order of own
-- Returns the number of claims withdrawn; 0 while the replica's record cannot be read.

-- include load
-- include owned

local incarnation, since_ms, is_unreadable = life_of(replicas_key, replica)
if is_unreadable then
  return 0
end
check_hashes(owned_tokens_key)
redis.call('ZCARD', held_key)
local withdrawn, freed_tokens = 0, 0
for i = 1, #KEYS - OWN_OFFSET do
  local own_key, key = KEYS[OWN_OFFSET + i], ARGV[KEYS_OFFSET + i]
  local record = field_of(own_key, replica)
  if record then
    local by = string.match(record, '^%S+ claim %S+ %S+ %S+ %S+ (%S+)')
    if by == reservation then
      redis.call('HDEL', own_key, replica)
      redis.call('ZREM', held_key, key)
      withdrawn = withdrawn + 1
      freed_tokens = freed_tokens + counted_span(record, incarnation, since_ms, owned_tokens_key, replica)
    end
  end
end
if freed_tokens > 0 then
  add(owned_tokens_key, replica, -freed_tokens)
end
return withdrawn
