-- Applies one entry of a replica's event stream to the map, and moves the cursor behind it, in one step: exactly once,
-- whoever dies in between. Entries come in order; one that is missing (the stream's cap cut it off) voids what was
-- said before, and the agent is asked to say everything again.
--
-- KEYS[1] leases   KEYS[2] cursors   KEYS[3] replicas   KEYS[4] owned_tokens   KEYS[5] held:<replica>   KEYS[6] asks
-- KEYS[7..] own:<key>, one for each transition that names a key, in order
-- ARGV[1] who   ARGV[2] replica   ARGV[3] the cursor as known   ARGV[4] the entry's stream id   ARGV[5] its number
-- ARGV[6] its incarnation   ARGV[7] at_ms   ARGV[8..] transitions (see publish)
-- Returns {"ok", lag_ms, 1 if entries were missing}, {"moved", cursor} where the cursor is another, or {"lost"} where
--         the lease is another's.

-- include time
-- include owned

local now = now_ms()
local replica = ARGV[2]
local holder = string.match(redis.call('HGET', KEYS[1], 'events:' .. replica) or '', '^%S+')
if holder ~= ARGV[1] then
  return { 'lost' }
end
local cursor = redis.call('HGET', KEYS[2], replica) or ''
if cursor ~= ARGV[3] then
  return { 'moved', cursor }
end
local number = tonumber(ARGV[5])
redis.call('HSET', KEYS[2], replica, ARGV[4] .. ' ' .. ARGV[5])

local incarnation, state, capacity, since_ms, floor, url =
  string.match(redis.call('HGET', KEYS[3], replica) or '', '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)')
local lag_ms = now - tonumber(ARGV[7])
if incarnation ~= ARGV[6] then
  return { 'ok', lag_ms, 0 }
end
floor = tonumber(floor)
local missing = number ~= tonumber(string.match(cursor, ' (%d+)$') or 0) + 1
if missing then
  floor = number
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
    local record = redis.call('HGET', KEYS[index], replica)
    local hits, used = '0', string.format('%d', math.max(now, since))
    if record then
      owned = owned - counted_span(record, incarnation, since_ms)
      local of, was_hits, was_used = string.match(record, '^(%S+) %S+ %S+ %S+ (%S+) (%S+)')
      if of == incarnation and tonumber(was_used) >= since then
        hits, used = was_hits, was_used
      end
    end
    redis.call('HSET', KEYS[index], replica, table.concat(
      { incarnation, 'resident', medium, span, hits, used, ARGV[5], tokens, block_hash }, ' '))
    redis.call('ZADD', KEYS[5], 'NX', used, key)
    owned = owned + tonumber(span)
  elseif what == '-' then
    -- A claim stays: entries are in order, so whoever made it computes the key again after this.
    local record = redis.call('HGET', KEYS[index], replica)
    if record and string.find(record, '^%S+ resident ') then
      owned = owned - counted_span(record, incarnation, since_ms)
      redis.call('HDEL', KEYS[index], replica)
      redis.call('ZREM', KEYS[5], rest)
    end
  elseif what == 'floor' then
    floor = math.max(floor, tonumber(rest))
  end
end
if owned ~= 0 then
  redis.call('HINCRBY', KEYS[4], replica, owned)
end
redis.call('HSET', KEYS[3], replica, table.concat(
  { incarnation, state, capacity, since_ms, string.format('%d', floor), url }, ' '))
return { 'ok', lag_ms, missing and 1 or 0 }
