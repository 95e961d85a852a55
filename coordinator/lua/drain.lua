-- Drains a replica: from now on it gets no new requests, and those that it has finish there. Or ends that.
-- A drain is that of one incarnation: a replica that restarts gets requests again. `draining` has "<incarnation> <ms>", and
-- "-<incarnation> <ms>" when the drain of this incarnation is over: then a statement that it is drained is an old one. With
-- " move" behind it, its requests do not finish there: gateways send them elsewhere.
--
-- KEYS
--   hash    replicas, draining, active, agents, asks
-- ARGV
--   text    replica
--   flag    is_over: the replica gets requests again. Its agent says again what it holds, because its keys were
--             forgotten.
--   flag    moves: its requests that can go on elsewhere do
-- Returns {the replica's state from now on ("": the pool does not know it), its requests in flight}.

-- include time
-- include subsets

check_hashes(replicas_key, asks_key)
local record = redis.call('HGET', replicas_key, replica) or ''
local incarnation, state, rest = string.match(record, '^(%S+) (%S+) (%d+ %d+ %d+ .+)$')
if not incarnation then
  return { '', 0 }
end
local now, before = now_ms(), state
if not is_over then
  write('HSET', draining_key, replica, incarnation .. string.format(' %d', now) .. (moves and ' move' or ''))
  state = state == 'ready' and 'draining' or state
else
  write('HSET', draining_key, replica, '-' .. incarnation .. ' ' .. string.format('%d', now))
  state = state == 'draining' and 'ready' or state
end
if state ~= before then
  redis.call('HSET', replicas_key, replica, table.concat({ incarnation, state, rest }, ' '))
  stand(base_of(replicas_key), replica, now, math.huge)
  if is_over and field_of(agents_key, replica) and not field_of(asks_key, replica) then
    write('HSET', asks_key, replica, 'restate')
  end
end
return { state, sum_of(field_of(active_key, replica)) }
