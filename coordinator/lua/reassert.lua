-- A gateway states all its live reservations under a new epoch. All its other reservations are dropped, and a `place`
-- of an older epoch that is still buffered somewhere will be refused.
--
-- KEYS
--   hash    gateways, flight:<gateway>, replicas, active, backlog_tokens, waiting, seats:<gateway>, charges:<gateway>
-- ARGV
--   text    gateway, epoch
--   number  lease_ms, kept_count
--   text    kept[kept_count]: the reservations of places on their way, and seats; they are kept unchanged
--   text    live(reservation, replica, incarnation, backlog_tokens, tip)...: not counted unless the incarnation is
--             the current one
-- Returns the number of reservations afterwards, or -1 if a newer epoch is known.

-- include time
-- include load

check_hashes(gateways_key, flight_key, replicas_key)
local known = redis.call('HGET', gateways_key, gateway)
if known and tonumber(string.match(known, '^%d+') or 0) > tonumber(epoch) then
  return -1
end

local keep, stated = {}, {}
for i = 1, kept_count do
  keep[ARGV[KEPT_OFFSET + i]] = true
end
for i = LIVE_OFFSET + 1, #ARGV, LIVE_SIZE do
  stated[ARGV[i]] = entry_of(replicas_key, unpack(ARGV, i + 1, i + LIVE_SIZE - 1))
end

-- An entry that equals the statement is left unchanged: with thousands in flight, nearly all do.
local standing = redis.call('HGETALL', flight_key)
for i = 1, #standing, 2 do
  local id, entry = standing[i], standing[i + 1]
  if stated[id] == entry then
    stated[id] = nil
  elseif not keep[id] then
    redis.call('HDEL', flight_key, id)
    give_back(entry, replicas_key, active_key, backlog_tokens_key)
  end
end
for id, entry in pairs(stated) do
  if not keep[id] then
    count_in(id, entry, flight_key, active_key, backlog_tokens_key)
  end
end

redis.call('HSET', gateways_key, gateway, epoch .. ' ' .. string.format('%d', now_ms() + lease_ms))
if redis.call('EXISTS', waiting_key, seats_key, charges_key) > 0 then
-- include grants
  local base, seats, charged = base_of(waiting_key), redis.pcall('HKEYS', seats_key), redis.pcall('HKEYS', charges_key)
  for i = 1, #seats do
    if not keep[seats[i]] then
      remove_seat(base, gateway, seats[i])
    end
  end
  for i = 1, #charged do
    if not field_of(flight_key, charged[i]) then
      settle_charge(base, gateway, charged[i])
    end
  end
  grant_turns(base, now_ms())
end
return redis.call('HLEN', flight_key)
