-- Takes out what does not hold any more of a replica's keys: records of past lives, residency below the floor, and old
-- claims, which whoever made them is not there to take back.
--
-- KEYS[1] replicas   KEYS[2] owned_tokens   KEYS[3] held:<replica>   KEYS[4..] own:<key>
-- ARGV[1] replica   ARGV[2] claims_before_ms: claims last used before it go (0: none)
-- ARGV[3..] the keys (32 hex each), in the order of KEYS[4..]
-- Returns the number of keys taken out.

-- include owned

local incarnation, since_ms, floor =
  string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^(%S+) %S+ %S+ (%S+) (%S+)')
local swept, freed_tokens = 0, 0
for i = 4, #KEYS do
  local record = redis.call('HGET', KEYS[i], ARGV[1])
  local gone = record == false
  if record then
    local of, used = string.match(record, '^(%S+) %S+ %S+ %S+ %S+ (%S+)')
    local entry = string.match(record, '^%S+ resident %S+ %S+ %S+ %S+ (%d+)')
    local is_old = entry == nil and tonumber(used) < tonumber(ARGV[2])
    if of ~= incarnation or is_old or (entry and tonumber(entry) < tonumber(floor)) then
      gone = true
      redis.call('HDEL', KEYS[i], ARGV[1])
      freed_tokens = freed_tokens + counted_span(record, incarnation, since_ms)
    end
  end
  if gone then
    redis.call('ZREM', KEYS[3], ARGV[i - 1])
    swept = swept + 1
  end
end
if freed_tokens > 0 then
  redis.call('HINCRBY', KEYS[2], ARGV[1], -freed_tokens)
end
return swept
