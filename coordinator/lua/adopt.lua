-- Counts a request that its gateway placed without the store. If the late placement has an entry under the same
-- reservation, the entry is replaced. The epoch is raised, so that a `place` still buffered somewhere is refused.
--
-- KEYS
--   hash    gateways, flight:<gateway>, replicas, active, backlog_tokens
-- ARGV
--   text    gateway, epoch, reservation, replica, incarnation, backlog_tokens, tip
-- Returns 1, or 0 if nothing was counted: the store does not know the gateway or is reaping it (it must reassert), or
-- the incarnation is not the current one.

-- include load

check_hashes(gateways_key, flight_key, replicas_key)
local known_epoch, until_ms = string.match(redis.call('HGET', gateways_key, gateway) or '', '^(%d+) (%d+)')
if known_epoch == nil or known_epoch == '0' or tonumber(known_epoch) > tonumber(epoch) then
  return 0
end
redis.call('HSET', gateways_key, gateway, epoch .. ' ' .. until_ms)
local standing = redis.call('HGET', flight_key, reservation)
if standing then
  redis.call('HDEL', flight_key, reservation)
  give_back(standing, replicas_key, active_key, backlog_tokens_key)
end
local entry = entry_of(replicas_key, replica, incarnation, backlog_tokens, tip)
if entry == nil then
  return 0
end
count_in(reservation, entry, flight_key, active_key, backlog_tokens_key)
return 1
