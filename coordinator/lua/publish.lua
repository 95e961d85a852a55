-- An agent says what became of its replica's keys: the map is changed, and the replica's stream gets an entry that says
-- the same, for whoever wants to read it. Entries are numbered without gaps.
--
-- KEYS
--   hash    agents, replicas, entries, cursors, owned_tokens
--   stream  events:<replica>
--   zset    held:<replica>
--   hash    own:<key>...: one for each transition that names a key, in the same order
-- ARGV
--   text    replica, agent, incarnation
--   text    cap: in entries
--   number  age_ms: of the oldest event in the entry
--   text    seq: the last engine batch of which everything is said with this entry; "" keeps what was said
--   number  last_entry: the number of the stream's last entry, as the agent knows it. A call on a connection that the
--             agent has given up may run late, behind what the agent has said since: then it is refused.
--   text    transitions...: a line each: "+ <key> <tokens> <span_tokens> <medium> <block hash>" | "- <key>" | "reset" |
--             "floor <entry>" (what was said before that entry, and not since, is void)
-- Returns the entry's number, or 0 if another agent holds the replica or it has another incarnation, or -1 if the
-- stream has gone on, or a record cannot be read: then the agent has to say everything again, on another connection.

-- include time
-- include entries
-- include owned
-- include parts

local record = redis.call('HGET', agents_key, replica) or ''
local holder = string.match(record, '^(%S+) %S+ %d+ %S+ %S+ %S+ %S')
local registered = redis.call('HGET', replicas_key, replica)
local current, since_ms, floor, url = string.match(registered or '', '^(%S+) %S+ %d+ (%d+) (%d+) (%S+)')
local has_published = last_entry ~= 0 -- then this agent's record was there, and is lost
if (holder == nil and has_published) or (registered and current == nil) then
  return -1
end
if holder ~= agent or current ~= incarnation then
  return 0
end
check_hashes(owned_tokens_key)
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
redis.call('HSET', cursors_key, replica, id .. ' ' .. number_text)

since_ms, floor = tonumber(since_ms), tonumber(floor)
local now_text = string.format('%d', math.max(now_ms(), since_ms))
local owned, to_remove, to_hold = 0, {}, {} -- changes of owned_tokens, and of held, in one call each

-- A key is resident now. It keeps its last use.
local function become_resident(own_key, key, line)
  local tokens, span, medium, block_hash = string.match(line, '^%+ %S+ (%S+) (%S+) (%S+) (%S+)')
  local known, hits, used = field_of(own_key, replica), '0', now_text
  owned = owned + tonumber(span)
  if known then
    owned = owned - counted_span(known, incarnation, since_ms, owned_tokens_key, replica)
    local of, was_hits, was_used = string.match(known, '^(%S+) %S+ %S+ %S+ (%d+) (%d+)')
    if of == incarnation and tonumber(was_used) >= since_ms then
      hits, used = was_hits, was_used
    end
  end
  write_counted('own', own_key, replica, table.concat(
    { incarnation, 'resident', medium, span, hits, used, number_text, tokens, block_hash }, ' '))
  to_hold[key] = used
end

-- A key is gone. If a claim stands there, that stays: entries are in order, so the request that made it computes the key
-- again after this.
local function evict(own_key, key)
  local known = field_of(own_key, replica)
  if known and string.find(known, '^%S+ resident ') then
    redis.call('HDEL', own_key, replica)
    owned = owned - counted_span(known, incarnation, since_ms, owned_tokens_key, replica)
    to_remove[#to_remove + 1], to_hold[key] = key, nil
  end
end

local last_reset, index = 0, OWN_OFFSET -- what stands before the last reset is void
for i = 1, #lines do
  last_reset = lines[i] == 'reset' and i or last_reset
end
for i = 1, #lines do
  local what, key = string.match(lines[i], '^(%S+) ?(%S*)')
  local is_void = i < last_reset
  if what == '+' or what == '-' then
    index = index + 1
  end
  if what == '+' and not is_void then
    become_resident(KEYS[index], key, lines[i])
  elseif what == '-' and not is_void then
    evict(KEYS[index], key)
  elseif what == 'reset' then
    floor = number
  elseif what == 'floor' and not is_void then
    floor = math.max(floor, tonumber(key))
  end
end
in_parts(to_remove, function(...) redis.call('ZREM', held_key, ...) end)
local scored = {}
for key, used in pairs(to_hold) do
  scored[#scored + 1], scored[#scored + 2] = used, key
end
in_parts(scored, function(...) redis.call('ZADD', held_key, 'NX', ...) end)
if owned ~= 0 then
  add(owned_tokens_key, replica, owned)
end
local life = string.match(registered, '^%S+ %S+ %d+')
local changed = string.format('%s %d %d %s', life, since_ms, floor, url)
if changed ~= registered then
  redis.call('HSET', replicas_key, replica, changed)
end
if seq ~= '' then
  redis.call('HSET', agents_key, replica, (string.gsub(record, '%S+$', seq)))
end
return number
