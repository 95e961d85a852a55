-- The fewest requests in flight; among equals the smallest backlog.

WEIGHS_CACHES = false

function nominate(orders)
  return { (orders.first(':in_flight', 2)) }
end

function choose(fleet)
  return least(fleet, math.huge, fleet.active, fleet.backlog)
end
