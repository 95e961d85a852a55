-- Of two random replicas, the one with fewer requests in flight.

WEIGHS_CACHES = false

function nominate(orders)
  return { orders.random(2) }
end

function choose(fleet)
  local a = math.random(fleet.count)
  if fleet.count == 1 then
    return a
  end
  local b = (a + math.random(fleet.count - 1) - 1) % fleet.count + 1
  return fleet.active[b] < fleet.active[a] and b or a
end
