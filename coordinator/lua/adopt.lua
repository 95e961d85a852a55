-- Counts the requests that a gateway placed without the store lately, and what those took of limits that are over. If a late placement has an entry
-- under the same reservation, the entry is replaced. The epoch is raised, so that a `place` still buffered somewhere is
-- refused.
--
-- KEYS
--   hash    gateways, flight:<gateway>, replicas, active, backlog_tokens, tenants, budgets:<gateway>
-- ARGV
--   text    gateway, epoch
--   number  spent_count
--   text    spent[spent_count]: "<reservation; -: many> <budget>", each of requests that are over; the budget is as for
--             reassert
--   text    adopted(reservation, replica, incarnation, backlog_tokens, tip, budget)...: not counted unless the
--             incarnation is the current one; the budget is as for reassert
-- Returns the number of requests that were counted; 0 if the store does not know the gateway or is reaping it: then it
-- must reassert.

-- include time
-- include load
-- include limits

local budget = budget_of(budgets_key, tenants_key)
check_hashes(gateways_key, flight_key, replicas_key)
for i = 1, spent_count do
  local reservation, text = string.match(ARGV[SPENT_OFFSET + i], '^(%S+) (.+)$')
  budget.spend(reservation or '', text or '', now_ms())
end
local known_epoch, until_ms = string.match(redis.call('HGET', gateways_key, gateway) or '', '^(%d+) (%d+)')
if known_epoch == nil or known_epoch == '0' or tonumber(known_epoch) > tonumber(epoch) then
  return 0
end
redis.call('HSET', gateways_key, gateway, epoch .. ' ' .. until_ms)

-- The sums change once for each replica: there may be thousands of requests, and the store is slow just now.
local requests, backlogs, counted, now = {}, {}, 0, now_ms()
local lives = {}
for i = ADOPTED_OFFSET + 1, #ARGV, ADOPTED_SIZE do
  local reservation, replica, incarnation, backlog, tip, stated = unpack(ARGV, i, i + ADOPTED_SIZE - 1)
  local standing = redis.call('HGET', flight_key, reservation)
  if standing then
    redis.call('HDEL', flight_key, reservation)
    give_back(standing, replicas_key, active_key, backlog_tokens_key)
  end
  if not lives[replica] then
    lives[replica] = { life_of(replicas_key, replica) }
  end
  local current, since_ms = unpack(lives[replica], 1, 2)
  if incarnation == current then
    local entry = table.concat({ replica, incarnation, since_ms, backlog, tip }, ' ')
    redis.call('HSET', flight_key, reservation, entry)
    budget.restate(reservation, stated, now)
    requests[replica] = (requests[replica] or 0) + 1
    backlogs[replica] = (backlogs[replica] or 0) + tonumber(backlog)
    counted = counted + 1
  end
end
for replica, number in pairs(requests) do
  add_load(active_key, backlog_tokens_key, replica, number, backlogs[replica])
end
return counted
