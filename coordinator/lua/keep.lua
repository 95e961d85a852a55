-- Counts records that were written into a slot of a ring of hashes, and goes on to the next slot when this one is full or
-- old. The oldest slot is deleted when all of them hold too much. It gets no record itself: what a script is given is
-- garbage for Redis' Lua, which takes more of Redis' time than writing the records does.
--
-- KEYS
--   hash    decided
--   hash    slots...
-- ARGV
--   number  max_bytes: of all slots
--   number  ttl_s: of a slot; it gets records for its share of this time
--   number  written: how many slots were begun before the one that was written into
--   number  added: bytes
-- Returns how many slots were begun before the one that gets records now.

-- include safe

local count, now_s = #KEYS - SLOTS_OFFSET, tonumber(redis.call('TIME')[1])
local at, since_s = string.match(field_of(decided_key, 'at') or '', '^(%d+) (%d+)$')
local is_lost = not at
at, since_s = sum_of(at), since_s and tonumber(since_s) or now_s
local bytes_of = {}

local function begin(number, began_s)
  write('HSET', decided_key, 'at', string.format('%d %d', number, began_s))
end

local function slot_of(number)
  return KEYS[SLOTS_OFFSET + 1 + number % count]
end

local function drop(number)
  redis.call('UNLINK', slot_of(number))
  redis.call('HDEL', decided_key, tostring(number % count))
  bytes_of[number % count] = nil
end

if is_lost then -- nobody knows what is in the slots
  begin(at, since_s)
  for number = 0, count - 1 do
    drop(number)
  end
end
local told = redis.call('HGETALL', decided_key)
for i = 1, #told, 2 do
  bytes_of[tonumber(told[i]) or told[i]] = sum_of(told[i + 1])
end

if added > 0 and not is_lost then
  local place = written % count
  if not bytes_of[place] then
    redis.call('EXPIRE', slot_of(written), string.format('%d', ttl_s))
  end
  bytes_of[place] = (bytes_of[place] or 0) + added
  redis.call('HSET', decided_key, tostring(place), string.format('%d', bytes_of[place]))
end

if (bytes_of[at % count] or 0) >= max_bytes / count or now_s - since_s > ttl_s / count then
  at = at + 1
  begin(at, now_s)
  for back = 0, count - 1 do
    if back == 0 or redis.call('EXISTS', slot_of(at - back)) == 0 then -- it is the oldest; or it was evicted
      drop(at - back)
    end
  end
end
local all = 0
for number = 0, count - 1 do
  all = all + (bytes_of[number] or 0)
end
for back = count - 1, 0, -1 do
  local size = bytes_of[(at - back) % count]
  if all > max_bytes and size then
    drop(at - back)
    all = all - size
  end
end
return at
