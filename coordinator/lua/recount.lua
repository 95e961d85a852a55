-- Sums a replica's owned_tokens again, a piece at a time, from its keys, which are the truth. If anything else changes
-- the sum between two pieces, the next piece notices, and the sum starts again, because the change may concern keys
-- that are counted already or not yet.
--
-- KEYS
--   hash    replicas, owned_tokens
--   hash    own:<key>...
-- ARGV
--   text    replica
--   text    sum_so_far: the sum that the last piece left; "": this is the first piece; "-": whatever the sum is now;
--             "?": do not sum, compare
-- Returns the sum so far, or -1 if it must start again. With "?": {tokens of these keys, the current sum}.

-- include load
-- include owned

local incarnation, since_ms = life_of(replicas_key, replica)
if incarnation == nil then
  return -1
end
local is_comparison = sum_so_far == '?'
if sum_so_far == '' then
  redis.call('HDEL', owned_tokens_key, '?' .. replica)
  redis.call('HSET', owned_tokens_key, replica, 0)
elseif sum_so_far ~= '-' and not is_comparison and redis.call('HGET', owned_tokens_key, replica) ~= sum_so_far then
  return -1
end
local tokens = 0
for i = OWN_OFFSET + 1, #KEYS do
  local record = field_of(KEYS[i], replica)
  if record and not string.find(record, OWNERSHIP) then
    redis.call('HDEL', KEYS[i], replica)
    mark(owned_tokens_key, replica, 1)
  elseif record then
    tokens = tokens + counted_span(record, incarnation, since_ms, owned_tokens_key, replica)
  end
end
if is_comparison then
  return { tokens, redis.call('HGET', owned_tokens_key, replica) }
end
add(owned_tokens_key, replica, tokens)
return tonumber(redis.call('HGET', owned_tokens_key, replica)) or -1
