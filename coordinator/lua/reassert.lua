-- A gateway states reservations that the store may not have: under `is_all` all that are live, and its others are dropped;
-- else those that it placed without the store lately. If a late placement has an entry under the same reservation, the
-- entry is replaced. The epoch is raised, so a `place` of an older one that is still buffered somewhere will be refused.
--
-- KEYS
--   hash    gateways, flight:<gateway>, replicas, active, backlog_tokens, waiting, seats:<gateway>, charges:<gateway>
--   hash    tenants, budgets:<gateway>
-- ARGV
--   text    gateway, epoch
--   number  lease_ms
--   flag    is_all
--   number  kept_count, spent_count
--   text    kept[kept_count]: the reservations of places on their way, and seats; they are kept unchanged
--   text    spent[spent_count]: "<reservation; -: many> <budget>", each of requests that are over, of which the store may
--             not know what they took of limits; the budget is as for `restate` in lib/limits.lua
--   text    live(reservation, replica, incarnation, backlog_tokens, tip, budget)...: not counted unless the incarnation
--             is the current one; the budget is "" if it has no limits
-- Returns the number of reservations afterwards, or -1 if a newer epoch is known; without `is_all` also if the store does
-- not know the gateway or is reaping it: then it must state all.

-- include time
-- include load
-- include tables
-- include limits

local budget, now = budget_of(budgets_key, tenants_key), now_ms()
check_hashes(gateways_key, flight_key, replicas_key)
for i = 1, spent_count do
  local reservation, text = string.match(ARGV[SPENT_OFFSET + i], '^(%S+) (.+)$')
  budget.spend(reservation or '', text or '', now)
end
local known, until_ms = string.match(redis.call('HGET', gateways_key, gateway) or '', '^(%d+) ?(%d*)')
if tonumber(known or 0) > tonumber(epoch) or (not is_all and ((known or '0') == '0' or until_ms == '')) then
  return -1
end
redis.call('HSET', gateways_key, gateway, epoch .. ' ' .. (is_all and string.format('%d', now + lease_ms) or until_ms))

local keep, stated, named, lives = {}, {}, {}, {}
for i = 1, kept_count do
  keep[ARGV[KEPT_OFFSET + i]] = true
end
for i = LIVE_OFFSET + 1, #ARGV, LIVE_SIZE do
  local id, replica, incarnation, backlog, tip = unpack(ARGV, i, i + 4)
  lives[replica] = lives[replica] or { life_of(replicas_key, replica) }
  local current, since_ms = unpack(lives[replica], 1, 2)
  named[#named + 1] = id
  stated[id] = incarnation == current and table.concat({ replica, incarnation, since_ms, backlog, tip }, ' ') or nil
end

-- What its requests have of limits.
local budgets = is_all and redis.pcall('HKEYS', budgets_key) or {}
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
local standing = is_all and pairs_of(flight_key) or {}
local entries = not is_all and #named > 0 and redis.call('HMGET', flight_key, unpack(named)) or {}
for i = 1, #entries do
  standing[named[i]] = entries[i] or nil
end
for id, entry in pairs(standing) do
  if stated[id] == entry then
    stated[id] = nil
  elseif not keep[id] then
    redis.call('HDEL', flight_key, id)
    give_back(entry, replicas_key, active_key, backlog_tokens_key)
  end
end
-- The sums change once for each replica: there may be thousands of requests, and the store may be slow just now.
local requests, backlogs = {}, {}
for id, entry in pairs(stated) do
  if not keep[id] then
    local replica, backlog = string.match(entry, '^(%S+) %S+ %S+ (%S+)')
    write_counted('flight', flight_key, id, entry)
    requests[replica], backlogs[replica] = (requests[replica] or 0) + 1, (backlogs[replica] or 0) + tonumber(backlog)
  end
end
for replica, number in pairs(requests) do
  add_load(active_key, backlog_tokens_key, replica, number, backlogs[replica])
end

if is_all and redis.call('EXISTS', seats_key, charges_key) > 0 then
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
