-- Takes out what does not hold any more of a replica's keys: records of past lives and such that cannot be read,
-- residency below the floor, and claims that nothing has confirmed although their requests are over.
--
-- KEYS[1] replicas   KEYS[2] owned_tokens   KEYS[3] held:<replica>   KEYS[4..] own:<key>, then flight:<gateway> of all
-- ARGV[1] replica   ARGV[2] claims_before_ms: claims last used before it go (0: none)
-- ARGV[3..] the keys (32 hex each), in the order of KEYS[4..]
-- Returns the number of keys taken out; none where the replica is not known, or its record cannot be read.

-- include owned

local incarnation, since_ms, floor =
  string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^(%S+) %S+ %d+ (%d+) (%d+) %S')
if incarnation == nil then
  return 0
end
check_hashes(KEYS[2])
redis.call('ZCARD', KEYS[3])
local last_own = #ARGV + 1
local function is_in_flight(reservation)
  for i = last_own + 1, #KEYS do
    if field_of(KEYS[i], reservation) then
      return true
    end
  end
  return false
end

local swept, freed_tokens = 0, 0
for i = 4, last_own do
  local record = field_of(KEYS[i], ARGV[1])
  local gone = record == false
  if record then
    local of, _, used = string.match(record, OWNERSHIP)
    local entry = string.match(record, '^%S+ resident %S+ %S+ %S+ %S+ (%d+)')
    local by = (tonumber(used) or 0) < tonumber(ARGV[2]) and string.match(record, '^%S+ claim %S+ %S+ %S+ %S+ (%S+)')
    local is_old = by and not is_in_flight(by)
    if of ~= incarnation or is_old or (entry and tonumber(entry) < tonumber(floor)) then
      gone = true
      redis.call('HDEL', KEYS[i], ARGV[1])
      freed_tokens = freed_tokens + counted_span(record, incarnation, since_ms, KEYS[2], ARGV[1])
    end
  end
  if gone then
    redis.call('ZREM', KEYS[3], ARGV[i - 1])
    swept = swept + 1
  end
end
if freed_tokens > 0 then
  add(KEYS[2], ARGV[1], -freed_tokens)
end
return swept
