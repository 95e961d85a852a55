-- A random replica, whatever its load.

WEIGHS_CACHES = false

function nominate(orders)
  return { orders.random(1) }
end

function choose(fleet)
  return math.random(fleet.count)
end
