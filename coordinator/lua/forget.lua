-- Removes a dead replica from everything that names it, once its keys are dropped. The replica is kept if it has begun
-- a new incarnation since, or if an agent holds it. If the agent came while keys were being dropped, it is asked to say
-- everything again.
--
-- KEYS
--   hash    replicas, agents, leases
--   zset    held:<replica>
--   stream  events:<replica>
--   list    measured:<replica>
--   hash    breakers, active, backlog_tokens, owned_tokens, engines, asks, reports, entries, cursors, tiers, progress
-- ARGV
--   text    replica, incarnation
--   flag    keys_dropped: false only asks whether the replica may be forgotten
-- Returns 0 if the replica is kept, else now_ms.

-- include time
-- include subsets

local of_replicas = {
  replicas_key, agents_key, breakers_key, active_key, backlog_tokens_key, owned_tokens_key, engines_key, asks_key,
  reports_key, entries_key, cursors_key, tiers_key, progress_key,
}
check_hashes(leases_key, unpack(of_replicas))
local current, state = string.match(redis.call('HGET', replicas_key, replica) or '', '^(%S+) (%S+)')
local now = now_ms()
local agent_until_ms = string.match(redis.call('HGET', agents_key, replica) or '', '^%S+ %S+ (%d+)')
local has_agent = tonumber(agent_until_ms or 0) >= now
if current ~= incarnation or state ~= 'dead' or has_agent then
  if has_agent and keys_dropped then
    redis.call('HSET', asks_key, replica, 'restate')
  end
  return 0
end
if not keys_dropped then
  return now
end
if redis.call('EXISTS', held_key) == 1 then
  return 0
end
redis.call('UNLINK', events_key, measured_key)
redis.call('HDEL', leases_key, 'events:' .. replica)
for _, key in ipairs(of_replicas) do
  redis.call('HDEL', key, replica)
end
stand(base_of(replicas_key), replica, now, math.huge)
return now
