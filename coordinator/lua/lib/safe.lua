-- Any key may hold anything: somebody wrote to it by hand, or with another tool. A key of another type reads as empty,
-- and gives way to what is written. What the sums cannot follow is marked in them, under a name that no replica has,
-- "?": the chores find it there and sum again (see repair).

local MAX_DIGITS = 15

local function is_number(text)
  return #text <= MAX_DIGITS and string.find(text, '^%d+$') ~= nil
end

-- A sum for one decision: 0 where it cannot be read, or is not there.
local function sum_of(text)
  local sum = tonumber(text or 0)
  return sum and sum >= 0 and sum < 1e15 and sum or 0 -- not where it is nan, either
end

-- HGET; false where there is no such field, or the key is no hash.
local function field_of(key, field)
  local value = redis.pcall('HGET', key, field)
  return type(value) == 'string' and value
end

-- A write to a key that may be of another type: then that one goes. Returns the reply, and whether it had to.
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

-- Asks for a sum to be made again: owned_tokens of a replica ("": of all), or both sums of load. `lost` is how many
-- records were dropped from what it sums.
local function mark(sums_key, replica, lost)
  redis.pcall('HINCRBY', sums_key, '?' .. replica, lost)
end

-- Writes a record that a sum counts. Where the key was of another type, what else it held is lost to the sum.
local function write_counted(sums_key, replica, key, field, record)
  local _, others_lost = write('HSET', key, field, record)
  if others_lost then
    mark(sums_key, replica, 1)
  end
end

-- Has the chores count a record that could not be read and is replaced here: `key` is the one that it stood in.
local function tell(key, field)
  local base, name = string.match(key, '^(.*:)([^:]+)$')
  mark(base .. 'unreadable', name .. ' ' .. field, 1)
end

-- Adds to a sum. One that cannot be read stays as it is until it is made again.
local function add(sums_key, replica, by)
  if by == by and math.abs(by) < 1e15 then
    redis.pcall('HINCRBY', sums_key, replica, string.format('%d', by))
  else
    mark(sums_key, replica, 0)
  end
end

-- Whoever checks that its keys are of their type before its first write is never stopped between two writes.
local function check_hashes(...)
  for _, key in ipairs({ ... }) do
    redis.call('HLEN', key)
  end
end
