-- Applies one entry of a replica's event stream to the map and moves the cursor behind it, in one step. So each entry
-- is applied exactly once, even if a process dies in between. Entries come in order. If one is missing (the stream's
-- cap cut it off), everything said before is void, and the agent is asked to say it again.
--
-- KEYS
--   hash    leases, cursors, replicas, owned_tokens
--   zset    held:<replica>
--   hash    asks
--   hash    own:<key>...: one for each transition that names a key, in the same order
-- ARGV
--   text    applier: who applies
--   text    replica
--   text    known_cursor: the cursor as the applier knows it
--   text    stream_id, number, incarnation: of the entry
--   number  happened_ms: when the oldest event in the entry happened
--   text    transitions...: see publish
-- Returns {"ok", lag_ms, 1 if entries were missing, else 0}, {"moved", cursor} if the cursor is another one, or
-- {"lost"} if another process has the lease, or the replica's record cannot be read.

-- include time
-- include owned
-- include entries
-- include parts

check_hashes(owned_tokens_key, asks_key)
redis.call('ZCARD', held_key)
local now = now_ms()
local holder = string.match(redis.call('HGET', leases_key, 'events:' .. replica) or '', '^%S+')
if holder ~= applier then
  return { 'lost' }
end
local cursor, last, is_lost = cursor_of(cursors_key, replica)
if cursor ~= known_cursor then
  return { 'moved', cursor }
end
local record = redis.call('HGET', replicas_key, replica)
local current, state, capacity, since_ms, floor, url =
  string.match(record or '', '^(%S+) (%S+) (%d+) (%d+) (%d+) (%S+)')
if record and current == nil then
  return { 'lost' }
end
if is_lost then
  tell(cursors_key, replica)
end
redis.call('HSET', cursors_key, replica, stream_id .. ' ' .. number)

local lag_ms = now - happened_ms
if incarnation ~= current then
  return { 'ok', lag_ms, 0 }
end
floor = tonumber(floor)
local entry_number = tonumber(number)
local missing = entry_number ~= last + 1
if missing then
  floor = math.max(floor, entry_number)
  if not redis.call('HGET', asks_key, replica) then
    redis.call('HSET', asks_key, replica, 'restate')
  end
end

local owned, index, since = 0, OWN_OFFSET, tonumber(since_ms)
local now_text = string.format('%d', math.max(now, since))
local to_remove, to_hold = {}, {} -- of held, in one call each
local void = 0 -- everything that the entry says before a reset in it is void, too
for i = TRANSITIONS_OFFSET + 1, #ARGV do
  if ARGV[i] == 'reset' then
    void, floor = i, entry_number
  end
end
for i = TRANSITIONS_OFFSET + 1, #ARGV do
  local what, rest = string.match(ARGV[i], '^(%S+) ?(.*)')
  if what == '+' or what == '-' then
    index = index + 1
  end
  if i < void then
    what = 'void'
  end
  if what == '+' then
    local key, tokens, span, medium, block_hash = string.match(rest, '^(%S+) (%S+) (%S+) (%S+) (%S+)')
    local record = field_of(KEYS[index], replica)
    local hits, used = '0', now_text
    if record then
      owned = owned - counted_span(record, incarnation, since_ms, owned_tokens_key, replica)
      local of, was_hits, was_used = string.match(record, '^(%S+) %S+ %S+ %S+ (%d+) (%d+)')
      if of == incarnation and tonumber(was_used) >= since then
        hits, used = was_hits, was_used
      end
    end
    write_counted(owned_tokens_key, '', KEYS[index], replica, table.concat(
      { incarnation, 'resident', medium, span, hits, used, number, tokens, block_hash }, ' '))
    to_hold[key] = used
    owned = owned + tonumber(span)
  elseif what == '-' then
    -- A claim stays: entries are in order, so the request that made it computes the key again after this.
    local record = field_of(KEYS[index], replica)
    if record and string.find(record, '^%S+ resident ') then
      owned = owned - counted_span(record, incarnation, since_ms, owned_tokens_key, replica)
      redis.call('HDEL', KEYS[index], replica)
      to_remove[#to_remove + 1] = rest
      to_hold[rest] = nil
    end
  elseif what == 'floor' then
    floor = math.max(floor, tonumber(rest))
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
local changed = table.concat({ incarnation, state, capacity, since_ms, string.format('%d', floor), url }, ' ')
if changed ~= record then
  redis.call('HSET', replicas_key, replica, changed)
end
return { 'ok', lag_ms, missing and 1 or 0 }
