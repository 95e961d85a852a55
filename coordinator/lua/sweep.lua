-- Removes a replica's keys whose records are not valid any more: records of past incarnations, records that cannot be
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

-- include remove

local incarnation, floor = string.match(redis.call('HGET', replicas_key, replica) or '', '^(%S+) %S+ %d+ %d+ (%d+) %S')
if incarnation == nil then
  return 0
end

local function is_in_flight(reservation)
  for i = FLIGHT_OFFSET + 1, #KEYS do
    if field_of(KEYS[i], reservation) then
      return true
    end
  end
  return false
end

return remove_keys(own_count, function(record)
  if not record then
    return true
  end
  local of, _, used_ms = string.match(record, OWNERSHIP)
  if of ~= incarnation then
    return true
  end
  local entry = string.match(record, '^%S+ resident %S+ %S+ %S+ %S+ (%d+)')
  if entry then
    return tonumber(entry) < tonumber(floor)
  end
  local by = tonumber(used_ms) < claims_before_ms and string.match(record, '^%S+ claim %S+ %S+ %S+ %S+ (%S+)')
  return by and not is_in_flight(by)
end)
