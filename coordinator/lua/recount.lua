-- Sums a replica's owned_tokens again, a piece at a time: its keys are the truth. Whatever else changes the sum between two
-- pieces is noticed by the next, and then it has to be begun again: nobody knows on which side of the piece it was.
--
-- KEYS[1] replicas   KEYS[2] owned_tokens   KEYS[3..] own:<key>
-- ARGV[1] replica   ARGV[2] the sum that the last piece left ("": this is the first; "-": whatever it is; "?": it is not
-- summed, but compared)
-- Returns the sum so far, or -1 where it must be begun again. With "?": {tokens of these keys, the sum as it stands}.

-- include load
-- include owned

local incarnation, since_ms = life_of(KEYS[1], ARGV[1])
if incarnation == nil then
  return -1
end
local is_look = ARGV[2] == '?'
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[2], '?' .. ARGV[1])
  redis.call('HSET', KEYS[2], ARGV[1], 0)
elseif ARGV[2] ~= '-' and not is_look and redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then
  return -1
end
local tokens = 0
for i = 3, #KEYS do
  local record = field_of(KEYS[i], ARGV[1])
  if record and not string.find(record, OWNERSHIP) then
    redis.call('HDEL', KEYS[i], ARGV[1])
    mark(KEYS[2], ARGV[1], 1)
  elseif record then
    tokens = tokens + counted_span(record, incarnation, since_ms, KEYS[2], ARGV[1])
  end
end
if is_look then
  return { tokens, redis.call('HGET', KEYS[2], ARGV[1]) }
end
add(KEYS[2], ARGV[1], tokens)
return tonumber(redis.call('HGET', KEYS[2], ARGV[1])) or -1
