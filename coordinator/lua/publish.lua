-- An agent says what became of its replica's keys: the map is changed, and the replica's stream gets an entry that says
-- the same, for whoever wants to read it. Entries are numbered without gaps.
--
-- KEYS
--   hash    agents, replicas, entries, cursors, owned_tokens, asks
--   stream  events:<replica>
--   zset    held:<replica>
--   hash    own:<key>...: one for each transition that names a key, in the same order
-- ARGV
--   text    replica, agent, incarnation
--   text    cap: in entries
--   number  age_ms: of the oldest event in the entry
--   flag    restates: everything that the replica holds is said again from this entry on
--   text    seq: the last engine batch of which everything is said with this entry; "" keeps what was said
--   number  last_entry: the number of the stream's last entry, as the agent knows it. A call on a connection that the
--             agent has given up may run late, behind what the agent has said since: then it is refused.
--   text    transitions...: a line each: "+ <key> <tokens> <span_tokens> <medium> <block hash>" | "- <key>" | "reset" |
--             "floor <entry>" (what was said before that entry, and not since, is void)
-- Returns the entry's number, or 0 if another agent holds the replica or it has another incarnation, or -1 if the
-- stream has gone on, or a record cannot be read: then the agent has to say everything again, on another connection.

-- include time
-- include entries
-- include transitions

local record = redis.call('HGET', agents_key, replica) or ''
local holder = string.match(record, '^(%S+) %S+ %d+ %S+ %S+ %S+ %S')
local registered = redis.call('HGET', replicas_key, replica)
local _, current, since_ms, floor = parts_of(registered)
local has_published = last_entry ~= 0 -- then this agent's record was there, and is lost
if (holder == nil and has_published) or (registered and current == nil) then
  return -1
end
if holder ~= agent or current ~= incarnation then
  return 0
end
check_hashes(owned_tokens_key, asks_key)
redis.call('ZCARD', held_key)
if entries_of(entries_key, replica, cursors_key, floor) ~= last_entry then
  return -1
end
local number = last_entry + 1
local number_text = string.format('%d', number)
local happened_ms = string.format('%d', now_ms() - age_ms)
local lines = { unpack(ARGV, TRANSITIONS_OFFSET + 1) }
local id = redis.call('XADD', events_key, 'MAXLEN', '~', cap, '*', -- first: it fails if the key is of another type
  'n', number_text, 'inc', incarnation, 'at_ms', happened_ms, 'transitions', table.concat(lines, '\n'))
redis.call('HSET', entries_key, replica, number_text)

local _, applied, is_lost = cursor_of(cursors_key, replica)
if is_lost then
  tell(cursors_key, 'cursors', replica)
end
if applied ~= last_entry then -- an older agent said what no gateway has applied: all said before this is void
  floor = number_text
  if not restates then
    ask_again(asks_key, replica)
  end
end
redis.call('HSET', cursors_key, replica, id .. ' ' .. number_text)

local entry = { replica = replica, incarnation = incarnation, since_ms = tonumber(since_ms), number = number }
local own_keys = { unpack(KEYS, OWN_OFFSET + 1) }
apply_entry(entry, registered, floor, lines, own_keys, owned_tokens_key, held_key, replicas_key)
if seq ~= '' then
  redis.call('HSET', agents_key, replica, (string.gsub(record, '%S+$', seq)))
end
return number
