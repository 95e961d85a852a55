-- Gives back what a dead gateway had reserved, a number of reservations per call, and moves them to `reaped`, where the
-- worker finds them and handles their claims. It is called for the gateways that a beat named, and checks again: a
-- gateway that came back in between keeps what it holds. The first call sets the epoch in the gateway's record to 0,
-- which no gateway has, so a gateway that comes back from then on has to reassert. The last call deletes the record.
--
-- KEYS
--   hash    gateways, flight:<gateway>, replicas, active, backlog_tokens, reaped, waiting
--   hash    seats:<gateway>, charges:<gateway>, tenants, budgets:<gateway>, holds, leased:<gateway>
--   list    grants:<gateway>, heard:<gateway>
-- ARGV
--   text    gateway
--   number  at_most: reservations to give back
--   number  silent_ms: for so long before the end of its lease the gateway most likely was not there any more
-- Its seats in queues go, too. What its requests had reserved of limits is kept for an hour: if it comes back, it tells
-- what they took. What they can have spent of budgets counts as settled until then (see spending.lapse). Returns how many
-- reservations and seats are left; also 0 if the lease is good or the gateway is not known.

-- include time
-- include load
-- include limits
-- include spending

local budget, spending = budget_of(budgets_key, tenants_key), spending_of(tenants_key, leased_key)
check_hashes(gateways_key, flight_key, replicas_key, active_key, backlog_tokens_key, reaped_key)
local epoch, until_text = string.match(redis.call('HGET', gateways_key, gateway) or '', '^(%d+) (%d+)')
if epoch == nil or (epoch ~= '0' and tonumber(until_text) >= now_ms()) then
  return 0
end
local ids = redis.call('HKEYS', flight_key)
local count, now = math.min(#ids, at_most), now_ms()
-- Its replicas have stopped when its connections were gone. A lease of 0 was written where the record could not be read.
local lived_ms = until_text == '0' and now or math.min(now, tonumber(until_text) - silent_ms)
if count > 0 then
  local entries = redis.call('HMGET', flight_key, unpack(ids, 1, count))
  for i = 1, count do
    give_back(entries[i], replicas_key, active_key, backlog_tokens_key)
    redis.call('HSET', reaped_key, ids[i], entries[i] .. ' ' .. gateway)
    budget.lapse(ids[i])
    if string.find(entries[i], '^%S+ %S+ %S+ [1-9]') then -- nothing of its answer had come
      spending.free(ids[i])
    else
      spending.lapse(ids[i], lived_ms)
    end
  end
  redis.call('HDEL', flight_key, unpack(ids, 1, count))
end
local seats = redis.pcall('HKEYS', seats_key)
if #seats > 0 then
-- include queue
  local base = base_of(waiting_key)
  for i = 1, math.min(#seats, at_most - count) do
    remove_seat(base, gateway, seats[i])
    budget.finish(seats[i], 0, now_ms())
  end
end
local left = #ids - count + math.max(0, #seats - (at_most - count))
if left == 0 then
  spending.lapse_others(lived_ms)
  redis.call('HDEL', gateways_key, gateway)
  redis.pcall('HDEL', holds_key, gateway)
  redis.call('UNLINK', seats_key, charges_key, grants_key, heard_key)
else
  redis.call('HSET', gateways_key, gateway, '0 ' .. until_text)
end
return left
