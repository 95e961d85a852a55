-- The numbers in a replica's event stream. Entries are numbered from 1. `entries` counts those published; `cursors`
-- says which one was applied last.

-- include safe

-- Returns three values: the cursor of a replica's stream, "<stream id> <number>" ("": nothing was applied yet, or it
-- cannot be read); its number; whether there is a cursor that cannot be read.
local function cursor_of(cursors_key, replica)
  local cursor = redis.call('HGET', cursors_key, replica) or ''
  local id_ms, id, number = string.match(cursor, '^(%d+)%-(%d+) (%d+)$')
  if number and is_number(id_ms) and is_number(id) and is_number(number) then
    return cursor, tonumber(number), false
  end
  return '', 0, cursor ~= ''
end

-- How many entries were published to a replica's stream; the next one gets the number after it. The count is made again
-- if it cannot be read, or if it is below the last number applied or below the floor: it is the largest of these two
-- and of the numbers in the entries behind the cursor.
local function entries_of(entries_key, replica, stream_key, cursors_key, floor)
  local text = redis.call('HGET', entries_key, replica) or '0'
  local cursor, applied = cursor_of(cursors_key, replica)
  local least = math.max(applied, tonumber(floor) or 0)
  if is_number(text) and tonumber(text) >= least then
    return tonumber(text)
  end
  if not is_number(text) then
    tell(entries_key, replica)
  end
  local behind = redis.call('XREAD', 'STREAMS', stream_key, string.match(cursor, '^%S+') or '0')
  for _, entry in ipairs(behind and behind[1][2] or {}) do
    for i = 1, #entry[2], 2 do
      local number = entry[2][i] == 'n' and is_number(entry[2][i + 1]) and tonumber(entry[2][i + 1]) or 0
      least = math.max(least, number)
    end
  end
  redis.call('HSET', entries_key, replica, string.format('%d', least))
  return least
end
