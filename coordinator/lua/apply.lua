-- Applies one entry of a replica's event stream to the map, and moves the cursor behind it, in one step: exactly once,
-- whoever dies in between. Entries come in order; one that is missing (the stream's cap cut it off) voids what was
-- said before, and the agent is asked to say everything again.
--
-- KEYS[1] leases   KEYS[2] cursors   KEYS[3] replicas   KEYS[4] owned_tokens   KEYS[5] held:<replica>   KEYS[6] asks
-- KEYS[7..] own:<key>, one for each transition that names a key, in order
-- ARGV[1] who   ARGV[2] replica   ARGV[3] the cursor as known   ARGV[4] the entry's stream id   ARGV[5] its number
-- ARGV[6] its incarnation   ARGV[7] at_ms   ARGV[8..] transitions (see publish)
-- Returns {"ok", lag_ms, 1 if entries were missing}, {"moved", cursor} where the cursor is another, or {"lost"} where
--         the lease is another's, or the replica's record cannot be read.

-- include time
-- include owned
-- include entries

check_hashes(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[6])
redis.call('ZCARD', KEYS[5])
local now = now_ms()
local replica = ARGV[2]
local holder = string.match(redis.call('HGET', KEYS[1], 'events:' .. replica) or '', '^%S+')
if holder ~= ARGV[1] then
  return { 'lost' }
end
local cursor, last, is_lost = cursor_of(KEYS[2], replica)
if cursor ~= ARGV[3] then
  return { 'moved', cursor }
end
local record = redis.call('HGET', KEYS[3], replica)
local incarnation, state, capacity, since_ms, floor, url =
  string.match(record or '', '^(%S+) (%S+) (%d+) (%d+) (%d+) (%S+)')
if record and incarnation == nil then
  return { 'lost' }
end
if is_lost then
  tell(KEYS[2], replica)
end
local number = tonumber(ARGV[5])
redis.call('HSET', KEYS[2], replica, ARGV[4] .. ' ' .. ARGV[5])

local lag_ms = now - tonumber(ARGV[7])
if incarnation ~= ARGV[6] then
  return { 'ok', lag_ms, 0 }
end
floor = tonumber(floor)
local missing = number ~= last + 1
if missing then
  floor = math.max(floor, number)
  if not redis.call('HGET', KEYS[6], replica) then
    redis.call('HSET', KEYS[6], replica, 'restate')
  end
end

local owned, index, since = 0, 6, tonumber(since_ms)
local void = 0 -- what an entry says before a reset in it is void with the rest
for i = 8, #ARGV do
  if ARGV[i] == 'reset' then
    void, floor = i, number
  end
end
for i = 8, #ARGV do
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
    local hits, used = '0', string.format('%d', math.max(now, since))
    if record then
      owned = owned - counted_span(record, incarnation, since_ms, KEYS[4], replica)
      local of, was_hits, was_used = string.match(record, '^(%S+) %S+ %S+ %S+ (%d+) (%d+)')
      if of == incarnation and tonumber(was_used) >= since then
        hits, used = was_hits, was_used
      end
    end
    write_counted(KEYS[4], '', KEYS[index], replica, table.concat(
      { incarnation, 'resident', medium, span, hits, used, ARGV[5], tokens, block_hash }, ' '))
    redis.call('ZADD', KEYS[5], 'NX', used, key)
    owned = owned + tonumber(span)
  elseif what == '-' then
    -- A claim stays: entries are in order, so whoever made it computes the key again after this.
    local record = field_of(KEYS[index], replica)
    if record and string.find(record, '^%S+ resident ') then
      owned = owned - counted_span(record, incarnation, since_ms, KEYS[4], replica)
      redis.call('HDEL', KEYS[index], replica)
      redis.call('ZREM', KEYS[5], rest)
    end
  elseif what == 'floor' then
    floor = math.max(floor, tonumber(rest))
  end
end
if owned ~= 0 then
  add(KEYS[4], replica, owned)
end
redis.call('HSET', KEYS[3], replica, table.concat(
  { incarnation, state, capacity, since_ms, string.format('%d', floor), url }, ' '))
return { 'ok', lag_ms, missing and 1 or 0 }
