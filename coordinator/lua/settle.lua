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
  local entry = redis.call('HGET', KEYS[1], id)
  if entry then
    found = found + 1
    if ARGV[i] == 'done' then
      redis.call('HDEL', KEYS[1], id)
      give_back(entry, KEYS[2], KEYS[3], KEYS[4])
    else
      local replica, incarnation, since_ms, backlog, tip = string.match(entry, '^(%S+) (%S+) (%S+) (%S+) (%S+)')
      if backlog ~= '0' then
        redis.call('HSET', KEYS[1], id, table.concat({ replica, incarnation, since_ms, '0', tip }, ' '))
        if is_counted(KEYS[2], replica, incarnation, since_ms) then
          redis.call('HINCRBY', KEYS[4], replica, -tonumber(backlog))
        end
      end
    end
  end
end
return found
