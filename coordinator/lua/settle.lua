-- Gives reserved load back: the prefill backlog at the first token, the whole reservation at the end.
-- Settling twice, or what was never reserved, changes nothing.
--
-- KEYS[1] flight:<gateway>   KEYS[2] replicas   KEYS[3] active   KEYS[4] backlog_tokens
-- ARGV[1..] pairs: "first_token" | "done", reservation id
-- Returns the number of reservations that were found.

-- include load

local found = 0
for i = 1, #ARGV, 2 do
  local id = ARGV[i + 1]
  local entry = field_of(KEYS[1], id)
  if entry then
    found = found + 1
    if ARGV[i] == 'done' then
      redis.call('HDEL', KEYS[1], id)
      give_back(entry, KEYS[2], KEYS[3], KEYS[4])
    else
      local replica, incarnation, since_ms, tip = uncount(entry, 0, KEYS[2], KEYS[3], KEYS[4])
      if replica then -- as it was, without backlog
        redis.call('HSET', KEYS[1], id, table.concat({ replica, incarnation, since_ms, '0', tip }, ' '))
      else
        redis.call('HDEL', KEYS[1], id)
      end
    end
  end
end
return found
