-- Takes out what does not hold any more of a replica's keys: records of past lives, residency below the floor, and
-- claims that nothing has confirmed although their requests are over.
--
-- KEYS[1] replicas   KEYS[2] owned_tokens   KEYS[3] held:<replica>   KEYS[4..] own:<key>, then flight:<gateway> of all
-- ARGV[1] replica   ARGV[2] claims_before_ms: claims last used before it go (0: none)
-- ARGV[3..] the keys (32 hex each), in the order of KEYS[4..]
-- Returns the number of keys taken out.

-- include owned

local incarnation, since_ms, floor =
  string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^(%S+) %S+ %S+ (%S+) (%S+)')
local last_own = #ARGV + 1
local function is_in_flight(reservation)
  for i = last_own + 1, #KEYS do
    if redis.call('HEXISTS', KEYS[i], reservation) == 1 then
      return true
    end
  end
  return false
end

local swept, freed_tokens = 0, 0
for i = 4, last_own do
  local record = redis.call('HGET', KEYS[i], ARGV[1])
  local gone = record == false
  if record then
    local of, used = string.match(record, '^(%S+) %S+ %S+ %S+ %S+ (%S+)')
    local entry = string.match(record, '^%S+ resident %S+ %S+ %S+ %S+ (%d+)')
    local by = tonumber(used) < tonumber(ARGV[2]) and string.match(record, '^%S+ claim %S+ %S+ %S+ %S+ (%S+)')
    local is_old = by and not is_in_flight(by)
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
