-- Reading and writing keys that may hold anything, because somebody wrote to them by hand or with another tool. What
-- cannot be read is ignored: a key of another type reads as empty, and is replaced when it is written. Maintenance
-- finds such records (see repair). What a script has replaced or removed before, it tells maintenance.

local MAX_DIGITS = 15

local function is_number(text)
  return #text <= MAX_DIGITS and string.find(text, '^%d+$') ~= nil
end

-- A sum, for one decision: 0 if it is missing or cannot be read.
local function sum_of(text)
  if not text then
    return 0
  end
  local sum = tonumber(text)
  return sum and sum >= 0 and sum < 1e15 and sum or 0 -- nan fails both comparisons
end

-- HGET; false if there is no such field, or the key is no hash.
local function field_of(key, field)
  local value = redis.pcall('HGET', key, field)
  return type(value) == 'string' and value
end

-- Writes to a key. If the key is of another type, it is deleted first. Returns the reply, and whether that was so.
local function write(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) ~= 'table' or not reply.err then
    return reply, false
  end
  if string.find(reply.err, 'WRONGTYPE') then
    redis.call('UNLINK', key)
  end
  return redis.call(command, key, ...), true
end

-- Tells maintenance of records that could not be read: of which kind they were, and whose ("": it is not known). `key` is
-- any key of the pool.
local function tell(key, kind, of, times)
  redis.pcall('HINCRBY', string.match(key, '^.-}:') .. 'unreadable', '?' .. kind .. ' ' .. of, times or 1)
end

-- Writes a record that a sum counts. If the key was of another type, its other records are lost to the sum.
local function write_counted(kind, key, field, record)
  local _, others_lost = write('HSET', key, field, record)
  if others_lost then
    tell(key, kind, '')
  end
end

-- Adds to a sum, and returns it; nil if it cannot be read. Such a sum stays as it is until it is made again.
local function add(sums_key, replica, by)
  local sum = redis.pcall('HINCRBY', sums_key, replica, string.format('%d', by))
  return type(sum) == 'number' and sum or nil
end

-- Raises an error if a key is of another type than a hash. A script that checks its keys before its first write is
-- never stopped between two writes.
local function check_hashes(...)
  for _, key in ipairs({ ... }) do
    redis.call('HLEN', key)
  end
end
