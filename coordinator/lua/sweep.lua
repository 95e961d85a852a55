-- Removes a replica's keys whose records are not valid any more: records of past incarnations, records that cannot be
-- read, residency below the floor, and claims that nothing has confirmed although their requests are over. One call
-- checks a piece of the keys: a pass begins at the most recently used key and goes down, so a removal moves only keys
-- that were checked already. The script makes the names of own:<key> and flight:<gateway> from its KEYS.
--
-- KEYS
--   hash    replicas, owned_tokens, gateways
--   zset    held:<replica>
-- ARGV
--   text    replica
--   number  left: how many of the least recently used keys the pass has not checked yet
--   number  at_most: keys to check
--   number  claims_before_ms: claims last used before it go; 0: no claims
--   number  down_to_ms: the pass ends at keys last used before it
-- Returns {how many are left now (0: the pass is over), how many were removed}. Nothing is left if the replica is not
-- known, or its record cannot be read.

-- include time
-- include remove

local incarnation, since_ms, floor =
  string.match(redis.call('HGET', replicas_key, replica) or '', '^(%S+) %S+ %d+ (%d+) (%d+) %S')
if incarnation == nil or left <= 0 then
  return { 0, 0 }
end
floor = tonumber(floor)
local latest_ms = math.max(now_ms(), tonumber(since_ms)) + 1000 -- a later use was written before the clock went back

local flights
local function is_in_flight(reservation)
  if flights == nil then
    flights = redis.call('HKEYS', gateways_key)
  end
  for i = 1, #flights do
    if field_of(pool_base .. 'flight:' .. flights[i], reservation) then
      return true
    end
  end
  return false
end

local start = math.max(0, left - at_most)
local keys = redis.call('ZRANGE', held_key, start, left - 1)
local removed = remove_keys(keys, function(record)
  if not record then
    return true
  end
  local of, kind, used_ms, by = string.match(record, '^(%S+) (%l+) %S+ %d+ %d+ (%d+) (%S+)')
  if of ~= incarnation then
    return true
  end
  if kind == 'resident' then
    return (tonumber(by) or 0) < floor
  end
  local used = tonumber(used_ms)
  return claims_before_ms > 0 and (used < claims_before_ms or used > latest_ms) and not is_in_flight(by)
end)
if down_to_ms > 0 and start > 0 then
  local lowest = redis.call('ZRANGE', held_key, start - 1, start - 1, 'WITHSCORES')
  if lowest[2] == nil or tonumber(lowest[2]) < down_to_ms then
    start = 0
  end
end
return { start, removed }
