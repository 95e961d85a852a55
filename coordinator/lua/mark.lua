-- Changes a replica's state, unless the process that found it hanging, asleep, or working again, comes too late.
--
-- For gateways of an older version, which do not know that a replica can be asleep, it is drained meanwhile: `draining` has
-- "<incarnation> <ms> asleep". If somebody drains it while it sleeps, it stays drained when it wakes up.
--
-- KEYS
--   hash    replicas, draining
-- ARGV
--   text    replica, incarnation
--   text    before: the state that it was seen in
--   text    after: its state from now on. A replica that is drained is not ready again, and one that was asleep before it
--             was dead sleeps still.
-- Returns 1, or 0 if the replica has another incarnation or another state by now.

-- include time
-- include subsets

local record = redis.call('HGET', replicas_key, replica) or ''
local current, state, rest = string.match(record, '^(%S+) (%S+) (.+)$')
if current ~= incarnation or state ~= before then
  return 0
end
local drained, why = string.match(field_of(draining_key, replica) or '', '^(%S+) %d+ ?(%S*)$')
local is_drained, now = drained == incarnation, now_ms()
if after == 'asleep' and not is_drained then
  write('HSET', draining_key, replica, incarnation .. ' ' .. string.format('%d', now) .. ' asleep')
elseif after == 'ready' and before ~= 'dead' and is_drained and why == 'asleep' then
  write('HSET', draining_key, replica, '-' .. incarnation .. ' ' .. string.format('%d', now))
  is_drained = false
end
local state_now = after == 'ready' and is_drained and (why == 'asleep' and why or 'draining') or after
redis.call('HSET', replicas_key, replica, table.concat({ incarnation, state_now, rest }, ' '))
stand(base_of(replicas_key), replica, now, math.huge)
return 1
