-- A gateway states what it has settled of budgets, and what its requests in flight hold of them: after each connection, if
-- the store has lost it, and for requests that it placed without the store. With heartbeats, and when half of one is used,
-- it also states its slices of budgets: one that the store does not know, or in another epoch, gets none. Nobody would reap it.
--
-- KEYS
--   hash    gateways, tenants, leased:<gateway>, spent:<gateway>
-- ARGV
--   text    gateway, epoch
--   text    sums: see spending.settle in lib/spending.lua, and spending.slice
--   flag    is_all: what it does not state is not in flight any more
--   number  kept_count
--   text    kept[kept_count]: the reservations of places on their way, and seats; they are kept unchanged
--   text    stated(reservation, lease)...: a lease is "<placed_ms>", and for each budget as in leased:<gateway>
-- Returns the life of the hash, for each sum the budget and what all gateways have settled, and what spending.slice adds.

-- include time
-- include spending

local spending, keep = spending_of(tenants_key, leased_key), {}
for i = 1, kept_count do
  keep[ARGV[KEPT_OFFSET + i]] = true
end
local told = spending.settle(spent_key, sums)
for i = STATED_OFFSET + 1, #ARGV, STATED_SIZE do
  if not keep[ARGV[i]] then
    spending.restate(ARGV[i], ARGV[i + 1])
    keep[ARGV[i]] = true
  end
end
if string.match(field_of(gateways_key, gateway) or '', '^%d+') == epoch then
  spending.slice(sums, redis.call('HLEN', gateways_key), now_ms(), told)
  for i = 2, #told, 2 do
    keep[told[i]] = true
  end
end
if is_all then
  spending.free_others(keep)
end
return told
