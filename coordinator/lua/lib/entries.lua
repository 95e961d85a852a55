-- The numbers in a replica's event stream, from 1. `entries` counts the entries that were published; `cursors` says which
-- one is in the map.

-- include safe
-- include time

-- Returns three values: the cursor of a replica's stream, "<stream id> <number>" ("": nothing is in the map yet, or it
-- cannot be read); its number; whether there is a cursor that cannot be read.
local function cursor_of(cursors_key, replica)
  local cursor = redis.call('HGET', cursors_key, replica) or ''
  local id_ms, id, number = string.match(cursor, '^(%d+)%-(%d+) (%d+)$')
  if number and is_number(id_ms) and is_number(id) and is_number(number) then
    return cursor, tonumber(number), false
  end
  return '', 0, cursor ~= ''
end

-- How many entries were published to a replica's stream; the next one gets the number after it. If the count cannot be
-- read, or is too small, the entry in the map tells it. If that cannot be read either, the numbers go on at the clock's ms,
-- which is above all numbers before: the agent finds that the stream has gone on, and says everything again.
local function entries_of(entries_key, replica, cursors_key, floor)
  local text = redis.call('HGET', entries_key, replica) or '0'
  local _, applied = cursor_of(cursors_key, replica)
  local least = math.max(applied, tonumber(floor) or 0)
  if not is_number(text) then
    tell(entries_key, 'entries', replica)
  elseif tonumber(text) >= least then
    return tonumber(text)
  end
  local count = applied > 0 and least or now_ms()
  redis.call('HSET', entries_key, replica, string.format('%d', count))
  return count
end
