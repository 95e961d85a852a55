-- A gateway states what it has settled of budgets, and what its requests in flight hold of them: after each connection, if
-- the store has lost it, and for requests that it placed without the store.
--
-- KEYS
--   hash    tenants, leased:<gateway>, spent:<gateway>
-- ARGV
--   text    sums: see spending.settle in lib/spending.lua
--   flag    is_all: what it does not state is not in flight any more
--   number  kept_count
--   text    kept[kept_count]: the reservations of places on their way, and seats; they are kept unchanged
--   text    stated(reservation, lease)...: a lease is "<placed_ms>", and for each budget as in leased:<gateway>
-- Returns the life of the hash, and for each sum the budget and what all gateways have settled.

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
if is_all then
  spending.free_others(keep)
end
return told
