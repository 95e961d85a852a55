-- Applies one entry of an older agent's stream to the map and moves the cursor behind it (see maintenance/older_agents.py).
-- If the entries before it are missing (the stream's cap cut them off), everything said before is void, and the agent is
-- asked to say it again.
--
-- KEYS
--   hash    cursors, replicas, owned_tokens
--   zset    held:<replica>
--   hash    asks
--   hash    own:<key>...: one for each transition that names a key, in the same order
-- ARGV
--   text    replica
--   text    known_cursor: the cursor as the caller knows it
--   text    stream_id, number, incarnation: of the entry
--   text    transitions...: see publish
-- Returns 1, or 0 if the cursor is another one or the replica's record cannot be read.

-- include time
-- include entries
-- include transitions

check_hashes(owned_tokens_key, asks_key)
redis.call('ZCARD', held_key)
local cursor, last, is_lost = cursor_of(cursors_key, replica)
local record = redis.call('HGET', replicas_key, replica)
local _, current, since_ms, floor = parts_of(record)
if cursor ~= known_cursor or (record and current == nil) then
  return 0
end
if is_lost then
  tell(cursors_key, 'cursors', replica)
end
redis.call('HSET', cursors_key, replica, stream_id .. ' ' .. number)
if incarnation ~= current then
  return 1
end
if tonumber(number) ~= last + 1 then
  floor = math.max(tonumber(floor), tonumber(number))
  ask_again(asks_key, replica)
end
local entry = {
  replica = replica, incarnation = incarnation, since_ms = tonumber(since_ms), number = tonumber(number),
}
local lines, own_keys = { unpack(ARGV, TRANSITIONS_OFFSET + 1) }, { unpack(KEYS, OWN_OFFSET + 1) }
apply_entry(entry, record, floor, lines, own_keys, owned_tokens_key, held_key, replicas_key)
return 1
