-- The fewest tokens to wait for and to compute (docs/adr/0002-placing.md).

local WEIGHS_CACHES = true

-- Nothing costs less than a replica where nothing is in flight, or one request while every replica has one, and whose
-- cache has room for the prompt, or as much as any has: but an owner of the prompt, who is found by its keys, or one that
-- can load it from LMCache, or the replica with the most free cache, where a copy of a prefix may cost less. If none of
-- the first by load is so, all orders are read. A request in flight costs more, the more tokens are new: then the order
-- by load says less, and more of it is looked at.
local function nominate(orders, new_tokens)
  local more = math.min(4, math.floor(new_tokens / 4000))
  local by_load, loads = orders.first(':load', 3 + more)
  local most_free, most = orders.first(':free', 1, true)
  local rooms, needed = orders.rooms(by_load), math.min(prompt_tokens, tonumber(most[1]) or 0)
  for i = 1, not has_tiers and loads[1] and tonumber(loads[1]) <= LOAD_PER_REQUEST and #by_load or 0 do
    if loads[i] == loads[1] and rooms[i] >= needed then
      return { by_load, most_free }
    end
  end
  return { by_load, (orders.first(':in_flight', 1 + more)), most_free, orders.with_room(rooms, needed, 1 + more) }
end

local function choose(fleet, limit)
  return least(fleet, limit, fleet.cost, fleet.occupied)
end
