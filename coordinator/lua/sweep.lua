-- Removes those of a replica's keys that do not hold any more: records of past incarnations, records that cannot be
-- read, residency below the floor, and claims that nothing has confirmed although their requests are over.
--
-- KEYS
--   hash    replicas, owned_tokens
--   zset    held:<replica>
--   hash    own:<key>[own_count]
--   hash    flight:<gateway>...: of all gateways
-- ARGV
--   text    replica
--   number  claims_before_ms: claims last used before it go; 0: no claims
--   number  own_count
--   text    keys...: in the order of own
-- Returns the number of keys removed; 0 if the replica is not known, or its record cannot be read.

-- include owned

local incarnation, since_ms, floor =
  string.match(redis.call('HGET', replicas_key, replica) or '', '^(%S+) %S+ %d+ (%d+) (%d+) %S')
if incarnation == nil then
  return 0
end
check_hashes(owned_tokens_key)
redis.call('ZCARD', held_key)
local function is_in_flight(reservation)
  for i = FLIGHT_OFFSET + 1, #KEYS do
    if field_of(KEYS[i], reservation) then
      return true
    end
  end
  return false
end

local swept, freed_tokens = 0, 0
for i = 1, own_count do
  local own_key, key = KEYS[OWN_OFFSET + i], ARGV[KEYS_OFFSET + i]
  local record = field_of(own_key, replica)
  local gone = record == false
  if record then
    local of, _, used = string.match(record, OWNERSHIP)
    local entry = string.match(record, '^%S+ resident %S+ %S+ %S+ %S+ (%d+)')
    local by = (tonumber(used) or 0) < claims_before_ms and string.match(record, '^%S+ claim %S+ %S+ %S+ %S+ (%S+)')
    local is_old = by and not is_in_flight(by)
    if of ~= incarnation or is_old or (entry and tonumber(entry) < tonumber(floor)) then
      gone = true
      redis.call('HDEL', own_key, replica)
      freed_tokens = freed_tokens + counted_span(record, incarnation, since_ms, owned_tokens_key, replica)
    end
  end
  if gone then
    redis.call('ZREM', held_key, key)
    swept = swept + 1
  end
end
if freed_tokens > 0 then
  add(owned_tokens_key, replica, -freed_tokens)
end
return swept
