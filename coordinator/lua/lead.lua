-- Takes, renews and hands over the leases under which event streams are applied, one per replica. Shares are even
-- among those who ask: who has more than his part of the replicas gives one back a beat, who has less takes what is
-- free. Who stops asking is counted until his leases lapse. What is given back is held by nobody ("-") for as long as
-- its lease would have lasted: its replica stays exact, for somebody will take it with his next beat. While a lease has
-- lapsed, what its replica holds is not known, and may be trimmed: who takes it then asks the agent to say it again.
-- So it is where a cursor cannot be read: the stream is read from its start.
--
-- KEYS[1] leases   KEYS[2] agents   KEYS[3] cursors   KEYS[4] asks
-- ARGV[1] who   ARGV[2] lease_ms   ARGV[3] "1": give all back and ask no more
-- Returns flat pairs of replica and cursor ("<stream id> <entry>", "": none yet), for the replicas held.

-- include time
-- include entries

check_hashes(KEYS[1], KEYS[2], KEYS[3], KEYS[4])
local now, asking = now_ms(), 0
local until_text = string.format('%d', now + tonumber(ARGV[2]))
if ARGV[3] == '1' then
  redis.call('HDEL', KEYS[1], 'applier:' .. ARGV[1])
else
  redis.call('HSET', KEYS[1], 'applier:' .. ARGV[1], until_text)
end
local leases = redis.call('HGETALL', KEYS[1])
for i = 1, #leases, 2 do
  if string.match(leases[i], '^applier:') then
    if (tonumber(leases[i + 1]) or 0) < now then
      redis.call('HDEL', KEYS[1], leases[i])
    else
      asking = asking + 1
    end
  end
end

local held, free = {}, {}
local replicas = redis.call('HKEYS', KEYS[2])
local share = ARGV[3] == '1' and 0 or math.ceil(#replicas / asking)
table.sort(replicas)
for i = 1, #replicas do
  local holder, until_ms = string.match(redis.call('HGET', KEYS[1], 'events:' .. replicas[i]) or '', '^(%S+) (%d+)')
  if holder == ARGV[1] then
    held[#held + 1] = replicas[i]
  elseif holder == nil or holder == '-' or tonumber(until_ms) < now then
    free[#free + 1] = replicas[i]
  end
end
for i = 1, math.min(#free, share - #held) do
  held[#held + 1] = free[i]
end

local kept = ARGV[3] == '1' and 0 or (#held > share and #held - 1 or #held)
local answer = {}
for i = 1, #held do
  local field = 'events:' .. held[i]
  if i > kept then
    redis.call('HSET', KEYS[1], field, '- ' .. until_text)
  else
    local cursor, _, is_lost = cursor_of(KEYS[3], held[i])
    if is_lost then
      tell(KEYS[3], held[i])
      redis.call('HDEL', KEYS[3], held[i])
    end
    local had_until_ms = string.match(redis.call('HGET', KEYS[1], field) or '', '^%S+ (%d+)$')
    local has_lapsed = cursor ~= '' and tonumber(had_until_ms or 0) < now
    if (is_lost or has_lapsed) and not redis.call('HGET', KEYS[4], held[i]) then
      redis.call('HSET', KEYS[4], held[i], 'restate')
    end
    redis.call('HSET', KEYS[1], field, ARGV[1] .. ' ' .. until_text)
    answer[#answer + 1] = held[i]
    answer[#answer + 1] = cursor
  end
end
return answer
