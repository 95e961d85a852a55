-- The fewest requests in flight; among equals the smallest backlog.

local WEIGHS_CACHES = false

local function nominate(orders)
  return { (orders.first(':in_flight', 2)) }
end

local function choose(fleet)
  return least(fleet, math.huge, fleet.active, fleet.backlog)
end
