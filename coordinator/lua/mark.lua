-- Changes a replica's state, unless the process that found it hanging, or working again, comes too late.
--
-- KEYS
--   hash    replicas, draining
-- ARGV
--   text    replica, incarnation
--   text    before: the state that it was seen in
--   text    after: its state from now on. A replica that is drained is not ready again.
-- Returns 1, or 0 if the replica has another incarnation or another state by now.

-- include time
-- include subsets

local record = redis.call('HGET', replicas_key, replica) or ''
local current, state, rest = string.match(record, '^(%S+) (%S+) (.+)$')
if current ~= incarnation or state ~= before then
  return 0
end
local is_drained = string.match(field_of(draining_key, replica) or '', '^%S+') == incarnation
local state_now = after == 'ready' and is_drained and 'draining' or after
redis.call('HSET', replicas_key, replica, table.concat({ incarnation, state_now, rest }, ' '))
stand(base_of(replicas_key), replica, now_ms(), math.huge)
return 1
