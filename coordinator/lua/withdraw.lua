-- Takes back the claims that one reservation made: its request failed before the first token, so nothing was
-- computed. A claim that a later reservation has renewed is left alone.
--
-- KEYS[1] replicas   KEYS[2] owned_tokens   KEYS[3] held:<replica>   KEYS[4..] own:<key>
-- ARGV[1] replica   ARGV[2] reservation id   ARGV[3..] the keys (32 hex each), in the order of KEYS[4..]
-- Returns the number of claims withdrawn; none while the replica's record cannot be read.

-- include load
-- include owned

local incarnation, since_ms, is_unreadable = life_of(KEYS[1], ARGV[1])
if is_unreadable then
  return 0
end
check_hashes(KEYS[2])
redis.call('ZCARD', KEYS[3])
local withdrawn, freed_tokens = 0, 0
for i = 4, #KEYS do
  local record = field_of(KEYS[i], ARGV[1])
  if record then
    local by = string.match(record, '^%S+ claim %S+ %S+ %S+ %S+ (%S+)')
    if by == ARGV[2] then
      redis.call('HDEL', KEYS[i], ARGV[1])
      redis.call('ZREM', KEYS[3], ARGV[i - 1])
      withdrawn = withdrawn + 1
      freed_tokens = freed_tokens + counted_span(record, incarnation, since_ms, KEYS[2], ARGV[1])
    end
  end
end
if freed_tokens > 0 then
  add(KEYS[2], ARGV[1], -freed_tokens)
end
return withdrawn
