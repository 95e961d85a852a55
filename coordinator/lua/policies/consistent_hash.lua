-- The first replica in the rendezvous order that the load guard allows.

WEIGHS_CACHES = false

function nominate(orders)
  local ordered = {}
  for replica in string.gmatch(order, '%S+') do
    ordered[#ordered + 1] = replica
  end
  return { ordered, (orders.first(':in_flight', 2)) }
end

function choose(fleet, limit)
  local index = {}
  for i = 1, fleet.count do
    index[fleet.name[i]] = i
  end
  for replica in string.gmatch(order, '%S+') do
    local i = index[replica]
    if i and fleet.guarded[i] < limit then
      return i
    end
  end
  return least(fleet, limit, fleet.active, fleet.backlog)
end
