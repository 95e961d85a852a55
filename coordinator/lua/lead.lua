-- Takes, renews and hands over the leases under which event streams are applied, one lease per replica. All appliers
-- get equal shares. An applier with more than its share gives one lease back at each beat. An applier with less takes
-- free leases. An applier that stops asking is counted until its leases lapse. A lease that is given back is held by
-- nobody ("-") for as long as it would have lasted: the replica stays exact, because another applier takes the lease
-- with its next beat. While a lease has lapsed, it is not known what its replica holds, and its keys may be trimmed. So
-- an applier that takes a lapsed lease asks the agent to say everything again. It also does so if a cursor cannot be
-- read: then the stream is read from its start.
--
-- KEYS
--   hash    leases, agents, cursors, asks
-- ARGV
--   text    applier
--   number  lease_ms
--   flag    leaving: give all leases back and ask for none
-- Returns flat pairs of replica and cursor ("<stream id> <entry>"; "" if there is none yet), for the replicas held.

-- include time
-- include entries

check_hashes(leases_key, agents_key, cursors_key, asks_key)
local now, asking = now_ms(), 0
local until_text = string.format('%d', now + lease_ms)
if leaving then
  redis.call('HDEL', leases_key, 'applier:' .. applier)
else
  redis.call('HSET', leases_key, 'applier:' .. applier, until_text)
end
local leases = redis.call('HGETALL', leases_key)
for i = 1, #leases, 2 do
  if string.match(leases[i], '^applier:') then
    if (tonumber(leases[i + 1]) or 0) < now then
      redis.call('HDEL', leases_key, leases[i])
    else
      asking = asking + 1
    end
  end
end

local held, free = {}, {}
local replicas = redis.call('HKEYS', agents_key)
local share = leaving and 0 or math.ceil(#replicas / asking)
table.sort(replicas)
for i = 1, #replicas do
  local holder, until_ms = string.match(redis.call('HGET', leases_key, 'events:' .. replicas[i]) or '', '^(%S+) (%d+)')
  if holder == applier then
    held[#held + 1] = replicas[i]
  elseif holder == nil or holder == '-' or tonumber(until_ms) < now then
    free[#free + 1] = replicas[i]
  end
end
for i = 1, math.min(#free, share - #held) do
  held[#held + 1] = free[i]
end

local kept = leaving and 0 or (#held > share and #held - 1 or #held)
local answer = {}
for i = 1, #held do
  local field = 'events:' .. held[i]
  if i > kept then
    redis.call('HSET', leases_key, field, '- ' .. until_text)
  else
    local cursor, _, is_lost = cursor_of(cursors_key, held[i])
    if is_lost then
      tell(cursors_key, held[i])
      redis.call('HDEL', cursors_key, held[i])
    end
    local had_until_ms = string.match(redis.call('HGET', leases_key, field) or '', '^%S+ (%d+)$')
    local has_lapsed = cursor ~= '' and tonumber(had_until_ms or 0) < now
    if (is_lost or has_lapsed) and not redis.call('HGET', asks_key, held[i]) then
      redis.call('HSET', asks_key, held[i], 'restate')
    end
    redis.call('HSET', leases_key, field, applier .. ' ' .. until_text)
    answer[#answer + 1] = held[i]
    answer[#answer + 1] = cursor
  end
end
return answer
