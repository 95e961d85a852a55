-- Gives reserved load back: the prefill backlog at the first token, the whole reservation at the end.
-- A reservation that is settled twice, or was never made, changes nothing.
--
-- KEYS
--   hash    flight:<gateway>, replicas, active, backlog_tokens
-- ARGV
--   text    settled(event, reservation)...: the event is "first_token" or "done"
-- Returns the number of reservations that were found.

-- include load

local found = 0
for i = SETTLED_OFFSET + 1, #ARGV, SETTLED_SIZE do
  local event, reservation = ARGV[i], ARGV[i + 1]
  local entry = field_of(flight_key, reservation)
  if entry then
    found = found + 1
    if event == 'done' then
      redis.call('HDEL', flight_key, reservation)
      give_back(entry, replicas_key, active_key, backlog_tokens_key)
    else
      local replica, incarnation, since_ms, tip = uncount(entry, 0, replicas_key, active_key, backlog_tokens_key)
      if replica then -- the entry as it was, without its backlog
        redis.call('HSET', flight_key, reservation, table.concat({ replica, incarnation, since_ms, '0', tip }, ' '))
      else
        redis.call('HDEL', flight_key, reservation)
      end
    end
  end
end
return found
