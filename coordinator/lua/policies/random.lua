-- A random replica, whatever its load.

local WEIGHS_CACHES = false

local function nominate(orders)
  return { orders.random(1) }
end

local function choose(fleet)
  return math.random(fleet.count)
end
