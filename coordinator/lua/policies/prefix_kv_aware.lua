-- The fewest tokens to wait for and to compute (docs/adr/0002-placing.md).

local WEIGHS_CACHES = true

-- A request in flight costs more, the more tokens are new: then the order by load says less, and more of it is looked at.
local function nominate(orders, new_tokens)
  local more = math.min(4, math.floor(new_tokens / 4000))
  local by_load, most_free = orders.first(':load', 3 + more), orders.first(':free', 1, true)
  return { by_load, orders.first(':in_flight', 1 + more), most_free, orders.with_room(by_load, most_free[1], 1 + more) }
end

local function choose(fleet, limit)
  return least(fleet, limit, fleet.cost, fleet.occupied)
end
