-- Appends one entry to a replica's event stream, for the agent that holds the replica. Entries are numbered without
-- gaps, so the applier sees when the cap has cut some off.
--
-- KEYS
--   hash    agents, replicas, entries
--   stream  events:<replica>
--   hash    cursors
-- ARGV
--   text    replica, agent, incarnation
--   text    cap: in entries
--   number  age_ms: of the oldest event in the entry
--   text    seq: the last engine batch of which everything is said with this entry; "" keeps what was said
--   number  last_entry: the number of the stream's last entry, as the agent knows it. A call on a connection that the
--             agent has given up may run late, behind what the agent has said since: then it is refused.
--   text    transitions: a line each: "+ <key> <tokens> <span_tokens> <medium> <block hash>" | "- <key>" | "reset" |
--             "floor <entry>" (what was said before that entry, and not since, is void)
-- Returns the entry's number, or 0 if another agent holds the replica or it has another incarnation, or -1 if the
-- stream has gone on, or a record cannot be read: then the agent has to say everything again, on another connection.

-- include time
-- include entries

local record = redis.call('HGET', agents_key, replica) or ''
local holder = string.match(record, '^(%S+) %S+ %d+ %S+ %S+ %S+ %S')
local registered = redis.call('HGET', replicas_key, replica)
local current, floor = string.match(registered or '', '^(%S+) %S+ %d+ %d+ (%d+) %S')
local has_published = last_entry ~= 0 -- then this agent's record was there, and is lost
if (holder == nil and has_published) or (registered and current == nil) then
  return -1
end
if holder ~= agent or current ~= incarnation then
  return 0
end
if entries_of(entries_key, replica, events_key, cursors_key, floor) ~= last_entry then
  return -1
end
local number = string.format('%d', last_entry + 1)
local happened_ms = string.format('%d', now_ms() - age_ms)
redis.call('XADD', events_key, 'MAXLEN', '~', cap, '*', -- first: it fails if the key is of another type
  'n', number, 'inc', incarnation, 'at_ms', happened_ms, 'transitions', transitions)
redis.call('HSET', entries_key, replica, number)
if seq ~= '' then
  redis.call('HSET', agents_key, replica, (string.gsub(record, '%S+$', seq)))
end
return last_entry + 1
