-- Takes a replica that is dead out of everything that names it, once its keys are dropped. A new life of it that has
-- begun since, or an agent that holds it, keeps it; if an agent came while keys were dropped, it is asked for all again.
--
-- KEYS[1] replicas   KEYS[2] agents   KEYS[3] leases   KEYS[4] held:<replica>   KEYS[5] events:<replica>
-- KEYS[6] measured:<replica>   KEYS[7] breakers   KEYS[8] active   KEYS[9] backlog_tokens   KEYS[10] owned_tokens
-- KEYS[11] engines   KEYS[12] asks   KEYS[13] reports   KEYS[14] entries   KEYS[15] cursors   KEYS[16] tiers
-- KEYS[17] progress
-- ARGV[1] replica   ARGV[2] incarnation   ARGV[3] "1": its keys are dropped; "0": say only whether it may be forgotten
-- Returns 0 where it is kept, else now_ms.

-- include time
-- include safe

check_hashes(KEYS[1], KEYS[2], KEYS[3], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13], KEYS[14],
  KEYS[15], KEYS[16], KEYS[17])
local incarnation, state = string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^(%S+) (%S+)')
local now = now_ms()
local agent_until_ms = string.match(redis.call('HGET', KEYS[2], ARGV[1]) or '', '^%S+ %S+ (%d+)')
local has_agent = tonumber(agent_until_ms or 0) >= now
if incarnation ~= ARGV[2] or state ~= 'dead' or has_agent then
  if has_agent and ARGV[3] == '1' then
    redis.call('HSET', KEYS[12], ARGV[1], 'restate')
  end
  return 0
end
if ARGV[3] == '0' then
  return now
end
if redis.call('EXISTS', KEYS[4]) == 1 then
  return 0
end
redis.call('UNLINK', KEYS[5], KEYS[6])
redis.call('HDEL', KEYS[3], 'events:' .. ARGV[1])
for _, of_replicas in ipairs({ KEYS[1], KEYS[2], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13],
  KEYS[14], KEYS[15], KEYS[16], KEYS[17] }) do
  redis.call('HDEL', of_replicas, ARGV[1])
end
return now
