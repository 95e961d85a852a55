-- Appends one entry to a replica's event stream, for the agent that holds the replica. Entries are numbered without
-- gaps, so whoever applies them sees when the cap has cut some off.
--
-- KEYS[1] agents   KEYS[2] replicas   KEYS[3] entries   KEYS[4] events:<replica>   KEYS[5] cursors
-- ARGV[1] replica   ARGV[2] agent   ARGV[3] incarnation   ARGV[4] cap (entries)   ARGV[5] age_ms of its oldest event
-- ARGV[6] seq: the last engine batch of which all is said with this ("": what was said stands)
-- ARGV[7] the number of the stream's last entry, as the agent knows it: what it sent on a connection that it has given
-- up may run late, behind what it has said since, and is refused
-- ARGV[8] transitions, a line each: "+ <key> <tokens> <span_tokens> <medium> <block hash>" | "- <key>" |
-- "reset" | "floor <entry>" (what was said before that entry and not since is void)
-- Returns the entry's number, 0: another agent holds the replica, or it lives another life, or -1: the stream has gone
-- on, or who holds the replica cannot be read: the agent has to say all again, on another connection.

-- include time
-- include entries

check_hashes(KEYS[1], KEYS[2], KEYS[3], KEYS[5])
check_stream(KEYS[4])
local record = redis.call('HGET', KEYS[1], ARGV[1]) or ''
local agent = string.match(record, '^(%S+) %S+ %d+ %S+ %S+ %S+ %S')
local replica = redis.call('HGET', KEYS[2], ARGV[1])
local incarnation, floor = string.match(replica or '', '^(%S+) %S+ %d+ %d+ (%d+) %S')
local was_here = ARGV[7] ~= '0' -- then it is the record that is not
if (agent == nil and was_here) or (replica and incarnation == nil) then
  return -1
end
if agent ~= ARGV[2] or incarnation ~= ARGV[3] then
  return 0
end
if entries_of(KEYS[3], ARGV[1], KEYS[4], KEYS[5], floor) ~= tonumber(ARGV[7]) then
  return -1
end
local number = redis.call('HINCRBY', KEYS[3], ARGV[1], 1)
local happened_ms = string.format('%d', now_ms() - tonumber(ARGV[5]))
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[4], '*',
  'n', number, 'inc', ARGV[3], 'at_ms', happened_ms, 'transitions', ARGV[8])
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], (string.gsub(record, '%S+$', ARGV[6])))
end
return number
