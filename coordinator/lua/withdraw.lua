-- Takes back the claims that one reservation made: its request failed before the first token, so nothing was
-- computed. A claim that a later reservation has renewed is left alone.
--
-- KEYS[1] replicas   KEYS[2] owned_tokens   KEYS[3] held:<replica>   KEYS[4..] own:<key>
-- ARGV[1] replica   ARGV[2] reservation id   ARGV[3..] the keys (32 hex each), in the order of KEYS[4..]
-- Returns the number of claims withdrawn.

-- include load
-- include owned

local incarnation, since_ms = life_of(KEYS[1], ARGV[1])
local withdrawn, freed_tokens = 0, 0
for i = 4, #KEYS do
  local record = redis.call('HGET', KEYS[i], ARGV[1])
  if record then
    local by = string.match(record, '^%S+ claim %S+ %S+ %S+ %S+ (%S+)')
    if by == ARGV[2] then
      redis.call('HDEL', KEYS[i], ARGV[1])
      redis.call('ZREM', KEYS[3], ARGV[i - 1])
      withdrawn = withdrawn + 1
      freed_tokens = freed_tokens + counted_span(record, incarnation, since_ms)
    end
  end
end
if freed_tokens > 0 then
  redis.call('HINCRBY', KEYS[2], ARGV[1], -freed_tokens)
end
return withdrawn
