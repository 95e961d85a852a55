-- The fewest tokens to wait for and to compute (docs/adr/0002-placing.md).

local WEIGHS_CACHES = true

-- A new prompt costs least where nothing is in flight, or no more than one request while every replica has one, and the
-- cache has room. If some of the prompt is known, its owners may cost less, who are found by their keys, or the replica
-- with the most free cache, where a copy of a prefix may cost less. If none of the first by load is so, all orders are
-- read. A request in flight costs more, the more tokens are new: then the order by load says less, and more of it is
-- looked at.
local function nominate(orders, new_tokens)
  local more = math.min(4, math.floor(new_tokens / 4000))
  local by_load, loads = orders.first(':load', 3 + more)
  local rooms, is_met = orders.rooms(by_load), false
  for i = 1, loads[1] and tonumber(loads[1]) <= LOAD_PER_REQUEST and #by_load or 0 do
    is_met = is_met or (loads[i] == loads[1] and rooms[i] >= prompt_tokens)
  end
  if is_met and new_tokens == prompt_tokens then
    return { by_load }
  end
  local most_free, most = orders.first(':free', 1, true)
  if is_met then
    return { by_load, most_free }
  end
  local with_room = orders.with_room(rooms, tonumber(most[1]) or 0, 1 + more)
  return { by_load, (orders.first(':in_flight', 1 + more)), most_free, with_room }
end

local function choose(fleet, limit)
  return least(fleet, limit, fleet.cost, fleet.occupied)
end
