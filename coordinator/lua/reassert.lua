-- A gateway states all its live reservations under a new epoch. All its other reservations are dropped, and a `place`
-- of an older epoch that is still buffered somewhere will be refused.
--
-- KEYS
--   hash    gateways, flight:<gateway>, replicas, active, backlog_tokens, waiting, seats:<gateway>, charges:<gateway>
--   hash    tenants, budgets:<gateway>
-- ARGV
--   text    gateway, epoch
--   number  lease_ms, kept_count
--   text    kept[kept_count]: the reservations of places on their way, and seats; they are kept unchanged
--   text    live(reservation, replica, incarnation, backlog_tokens, tip, budget)...: not counted unless the incarnation
--             is the current one; the budget is as for `restate` in lib/limits.lua, "" if it has no limits
-- Returns the number of reservations afterwards, or -1 if a newer epoch is known.

-- include time
-- include load
-- include limits

local budget = budget_of(budgets_key, tenants_key)
check_hashes(gateways_key, flight_key, replicas_key)
local known = redis.call('HGET', gateways_key, gateway)
if known and tonumber(string.match(known, '^%d+') or 0) > tonumber(epoch) then
  return -1
end

local keep, stated, now = {}, {}, now_ms()
for i = 1, kept_count do
  keep[ARGV[KEPT_OFFSET + i]] = true
end
for i = LIVE_OFFSET + 1, #ARGV, LIVE_SIZE do
  stated[ARGV[i]] = entry_of(replicas_key, unpack(ARGV, i + 1, i + 4))
end

-- What its requests have of limits.
local budgets = redis.pcall('HKEYS', budgets_key)
for i = 1, #budgets do
  if not keep[budgets[i]] and not stated[budgets[i]] then
    budget.finish(budgets[i], nil, now)
  end
end
for i = LIVE_OFFSET + 1, #ARGV, LIVE_SIZE do
  if stated[ARGV[i]] and not keep[ARGV[i]] then
    budget.restate(ARGV[i], ARGV[i + 5], now)
  end
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

redis.call('HSET', gateways_key, gateway, epoch .. ' ' .. string.format('%d', now + lease_ms))
if redis.call('EXISTS', seats_key, charges_key) > 0 then
-- include queue
  local base, seats, charged = base_of(waiting_key), redis.pcall('HKEYS', seats_key), redis.pcall('HKEYS', charges_key)
  for i = 1, #seats do
    if not keep[seats[i]] then
      remove_seat(base, gateway, seats[i])
      if not field_of(flight_key, seats[i]) then -- its gateway may have placed it without the store
        budget.finish(seats[i], 0, now)
      end
    end
  end
  for i = 1, #charged do
    if not field_of(flight_key, charged[i]) then
      settle_charge(base, gateway, charged[i])
    end
  end
end
return redis.call('HLEN', flight_key)
