-- Takes, renews and hands over the leases under which event streams are applied, one lease per replica. All appliers
-- get equal shares. An applier with more than its share gives a quarter of the surplus back at each beat. An applier
-- with less takes free leases. An applier that stops asking is counted until its leases lapse. A lease that is given
-- back is held by nobody ("-") for as long as it would have lasted: the replica stays exact, because another applier
-- takes the lease with its next beat. While a lease has lapsed, it is not known what its replica holds, and its keys may
-- be trimmed. So an applier that takes a lapsed lease asks the agent to say everything again. It also does so if a
-- cursor cannot be read: then the stream is read from its start.
--
-- Gateways' heartbeats note how large a share is, and whether a stream is free (see lib/view.lua). While there is
-- nothing to take or to give back, an applier renews its own leases and looks at no others.
--
-- KEYS
--   hash    leases, agents, cursors, asks, view
-- ARGV
--   text    applier
--   number  lease_ms
--   flag    leaving: give all leases back and ask for none
--   text    known...: the replicas whose leases this applier has; none if it may not know all of them
-- Returns flat pairs of replica and cursor ("<stream id> <entry>"; "" if there is none yet), for the replicas held.

local NOTED_MS = 1000 -- what a heartbeat noted earlier is not believed

-- include time
-- include entries
-- include view

check_hashes(leases_key, agents_key, cursors_key, asks_key)
local now = now_ms()
local until_text = string.format('%d', now + lease_ms)

-- Renews the leases of the known replicas, if that is all there is to do. Returns flat pairs of replica and cursor; nil
-- if it is not all, and then nothing was written.
local function renew()
  local count = #ARGV - KNOWN_OFFSET
  if leaving or count == 0 or type(redis.pcall('HLEN', view_key)) ~= 'number' then
    return nil
  end
  local _, _, made_ms, share, untended = view_head(view_key)
  if made_ms == nil or now - made_ms > NOTED_MS or now < made_ms or count > share or (count < share and untended > 0) then
    return nil
  end
  local applier_field = 'applier:' .. applier
  local fields, renewed, answer = {}, { applier_field, until_text }, {}
  local is_well = (tonumber(redis.call('HGET', leases_key, applier_field) or 0) or 0) >= now
  for i = KNOWN_OFFSET + 1, #ARGV do
    local cursor, _, is_lost = cursor_of(cursors_key, ARGV[i])
    is_well = is_well and not is_lost
    fields[#fields + 1] = 'events:' .. ARGV[i]
    answer[#answer + 1], answer[#answer + 2] = ARGV[i], cursor
    renewed[#renewed + 1], renewed[#renewed + 2] = 'events:' .. ARGV[i], applier .. ' ' .. until_text
  end
  in_parts(fields, function(...)
    for _, lease in ipairs(redis.call('HMGET', leases_key, ...)) do
      local holder, until_ms = string.match(lease or '', '^(%S+) (%d+)$')
      is_well = is_well and holder == applier and tonumber(until_ms) >= now
    end
  end)
  if not is_well then
    return nil
  end
  in_parts(renewed, function(...) redis.call('HSET', leases_key, ...) end)
  return answer
end

local renewed = renew()
if renewed then
  return renewed
end

if leaving then
  redis.call('HDEL', leases_key, 'applier:' .. applier)
else
  redis.call('HSET', leases_key, 'applier:' .. applier, until_text)
end
local flat, leases, asking = redis.call('HGETALL', leases_key), {}, 0
for i = 1, #flat, 2 do
  leases[flat[i]] = flat[i + 1]
  if string.sub(flat[i], 1, 8) == 'applier:' then
    if (tonumber(flat[i + 1]) or 0) < now then
      redis.call('HDEL', leases_key, flat[i])
    else
      asking = asking + 1
    end
  end
end

local held, free = {}, {}
local replicas = redis.call('HKEYS', agents_key)
local share = leaving and 0 or math.ceil(#replicas / asking)
for i = 1, #replicas do
  local holder, until_ms = string.match(leases['events:' .. replicas[i]] or '', '^(%S+) (%d+)')
  if holder == applier then
    held[#held + 1] = replicas[i]
  elseif holder == nil or holder == '-' or tonumber(until_ms) < now then
    free[#free + 1] = replicas[i]
  end
end
table.sort(held)
table.sort(free)
for i = 1, math.min(#free, share - #held) do
  held[#held + 1] = free[i]
end

local kept = leaving and 0 or #held - math.ceil(math.max(0, #held - share) / 4)
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
    local had_until_ms = string.match(leases[field] or '', '^%S+ (%d+)$')
    local has_lapsed = cursor ~= '' and tonumber(had_until_ms or 0) < now
    if (is_lost or has_lapsed) and not redis.call('HGET', asks_key, held[i]) then
      redis.call('HSET', asks_key, held[i], 'restate')
    end
    redis.call('HSET', leases_key, field, applier .. ' ' .. until_text)
    answer[#answer + 1], answer[#answer + 2] = held[i], cursor
  end
end
return answer
