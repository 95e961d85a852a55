-- Ends the wait of requests whose clients have gone, or cannot wait any longer. A seat that was granted before, or was
-- never taken, changes nothing.
--
-- KEYS
--   hash    waiting, flight:<gateway>, tenants, budgets:<gateway>
-- ARGV
--   text    gateway
--   text    seats...
-- Returns how many waited.

-- include time
-- include limits
-- include queue

local left, base, now = 0, base_of(waiting_key), now_ms()
local budget = budget_of(budgets_key, tenants_key)
for i = SEATS_OFFSET + 1, #ARGV do
  if remove_seat(base, gateway, ARGV[i]) then
    left = left + 1
    if not field_of(flight_key, ARGV[i]) then -- its gateway may have placed it without the store
      budget.finish(ARGV[i], 0, now)
    end
  end
end
return left
