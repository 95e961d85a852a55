-- An agent's heartbeat. It reserves the replica for this agent (one agent at a time), stores what the agent knows, and
-- returns what the agent is asked. A record in `agents` is
--   "<agent> <incarnation> <lease_until_ms> <mode> <1 while relearning, else 0> <waiting> <seq>"
-- where `mode` tells what the events confirm that the agent hears (session | partial | unconfirmed | none: see the
-- README), `waiting` is the length of the engine's queue, and `seq` is the last engine batch that the agent has worked in.
--
-- KEYS
--   hash    agents, replicas, asks
--   list    measured:<replica>
--   hash    engines, entries, cursors, restating
-- ARGV
--   text    replica, agent, incarnation
--   number  lease_ms: 0 if the agent leaves
--   text    mode
--   text    relearning: "1" or "0"
--   text    waiting
--   text    seq: "" keeps the number that the last agent of this incarnation said
--   text    counters: the engine's, as JSON; "" if not known
--   number  held_tokens: in the blocks that the engine holds now. A capacity that is less than this is wrong, and raised.
--   flag    restates: the agent is about to say everything again, or says it
-- Returns {"held", ms until the replica may be free} if another agent has it, {"unregistered"} if this is not the
-- replica's current incarnation, {"unreadable"} if the replica's record cannot be read, or
-- {"ok", the record in `agents` as it was ("": none), what the agent is asked ("" | "restate" | "reset"),
-- measured prompts, entries published so far, 1 if this agent's own lease had lapsed, else 0, number of agents in the
-- pool, the replica's state in the registry, number of agents that say everything again}. Every hash is read before the first write, so that a key of another type stops the script before it.

-- include time
-- include entries

local now = now_ms()
local record = redis.call('HGET', agents_key, replica) or ''
local holder, watched, until_ms, last_seq = string.match(record, '^(%S+) (%S+) (%d+) %S+ %S+ %S+ (%-?%d+)')
if holder and holder ~= agent and tonumber(until_ms) >= now then
  return { 'held', math.min(tonumber(until_ms) - now, lease_ms) } -- it is longer only if the clock went back
end
if record ~= '' and holder == nil then
  tell(agents_key, 'agents', replica)
end
if lease_ms == 0 then
  write('HDEL', restating_key, replica)
  if holder == agent then -- its record is kept for its successor, with the time at which it left
    redis.call('HSET', agents_key, replica,
      (string.gsub(record, '^(%S+ %S+) %d+', '%1 ' .. string.format('%d', now - 1))))
  end
  return { 'ok', record, '', {}, 0, 0, 0, '', 0 }
end
local registered = redis.call('HGET', replicas_key, replica)
local current, state, capacity, since_ms, floor, url =
  string.match(registered or '', '^(%S+) (%S+) (%d+) (%d+) (%d+) (%S+)')
if registered and current == nil then
  return { 'unreadable' }
elseif current ~= incarnation then
  return { 'unregistered' }
end
local asked = redis.call('HGET', asks_key, replica) or ''
local measured = redis.call('LRANGE', measured_key, 0, -1)
if counters ~= '' then
  check_hashes(engines_key)
end
local entries = entries_of(entries_key, replica, cursors_key, floor)
if seq == '' then
  seq = watched == incarnation and last_seq or '-1'
end
local lease_until = string.format('%d', now + lease_ms)
redis.call('HSET', agents_key, replica,
  table.concat({ agent, incarnation, lease_until, mode, relearning, waiting, seq }, ' '))
if counters ~= '' then
  redis.call('HSET', engines_key, replica, counters)
end
if asked ~= '' then
  redis.call('HDEL', asks_key, replica)
end
if restates then
  write('HSET', restating_key, replica, lease_until)
else
  write('HDEL', restating_key, replica)
end
if capacity ~= '0' and held_tokens > tonumber(capacity) then
  local tokens = string.format('%d', held_tokens)
  redis.call('HSET', replicas_key, replica, table.concat({ current, state, tokens, since_ms, floor, url }, ' '))
end
redis.call('UNLINK', measured_key)
local lapsed = holder == agent and tonumber(until_ms) < now and 1 or 0
return {
  'ok', record, asked, measured, entries, lapsed, redis.call('HLEN', agents_key), state,
  redis.call('HLEN', restating_key),
}
