-- Removes a dead replica from everything that names it, but from the keys that it owns: these may be very many. Nobody
-- reads them any more, because no record of the replica says in which incarnation it is. Maintenance removes them (trim); until
-- then `forgotten` names the replica. The replica is kept if it has begun a new incarnation since, or if an agent holds
-- it.
--
-- KEYS
--   hash    replicas, agents, leases, forgotten
--   zset    held:<replica>
--   stream  events:<replica>
--   list    measured:<replica>
--   hash    breakers, active, backlog_tokens, owned_tokens, engines, asks, reports, entries, cursors, tiers, progress
--   hash    rates, speeds, draining, restating
-- ARGV
--   text    replica, incarnation
-- Returns 1 if the replica is forgotten, else 0.

-- include time
-- include subsets

local of_replicas = {
  replicas_key, agents_key, breakers_key, active_key, backlog_tokens_key, owned_tokens_key, engines_key, asks_key,
  reports_key, entries_key, cursors_key, tiers_key, progress_key, rates_key,
  speeds_key, draining_key, restating_key,
}
check_hashes(leases_key, forgotten_key, unpack(of_replicas))
local current, state = string.match(redis.call('HGET', replicas_key, replica) or '', '^(%S+) (%S+)')
local now = now_ms()
local agent_until_ms = string.match(redis.call('HGET', agents_key, replica) or '', '^%S+ %S+ (%d+)')
if current ~= incarnation or state ~= 'dead' or tonumber(agent_until_ms or 0) >= now then
  return 0
end
redis.call('UNLINK', events_key, measured_key)
redis.call('HDEL', leases_key, 'events:' .. replica)
for _, key in ipairs(of_replicas) do
  redis.call('HDEL', key, replica)
end
stand(base_of(replicas_key), replica, now, math.huge)
if redis.call('EXISTS', held_key) == 1 then
  redis.call('HSET', forgotten_key, replica, string.format('%d', now))
end
return 1
