-- The numbers in a replica's event stream, from 1. `entries` counts the entries that were published; `cursors` says which
-- one is in the map.

-- include safe
-- include time

-- How many entries were published to a replica's stream; the next one gets the number after it. If the count cannot be
-- read, or is too small, the entry in the map tells it. If that cannot be read either, the numbers go on at the clock's ms,
-- which is above all numbers before: the agent finds that the stream has gone on, and says everything again.
local function entries_of(entries_key, replica, cursors_key, floor)
  local text = redis.call('HGET', entries_key, replica) or '0'
  local applied = sum_of(string.match(redis.call('HGET', cursors_key, replica) or '', '^%d+%-%d+ (%d+)$'))
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
