-- The fewest tokens to wait for and to compute (docs/adr/0002-placing.md).

WEIGHS_CACHES = true

-- The best is a replica with the least load of all, which is nothing or one request, and with room for the prompt in its
-- cache, or as much room as any has. Only two kinds of others can cost less. An owner of the prompt is found by its keys.
-- A copy of a prefix may cost less in the largest free cache. So the search ends there, unless replicas load from LMCache:
-- then any of them may cost less. Else all orders are read. A request in flight costs more, the more tokens are new. Then
-- the order by load says less, and more of it is looked at. If the replicas are not equally fast, a faster one may cost
-- less although it has more to do: some random ones come to them, which finds fast ones as often as they are the best.
function nominate(orders, new_tokens)
  local more = math.min(4, math.floor(new_tokens / 4000))
  local by_load, loads = orders.first(':load', 3 + more)
  local most_free, most = orders.first(':free', 1, true)
  local rooms, needed = orders.rooms(by_load), math.min(prompt_tokens, tonumber(most[1]) or 0)
  local may_end = not has_tiers and not speeds and loads[1] and tonumber(loads[1]) <= LOAD_PER_REQUEST
  for i = 1, may_end and #by_load or 0 do
    if loads[i] == loads[1] and rooms[i] >= needed then
      return { by_load, most_free }
    end
  end
  local any = speeds and orders.random(8) or nil
  return { by_load, (orders.first(':in_flight', 1 + more)), most_free, orders.with_room(rooms, needed, 1 + more), any }
end

function choose(fleet, limit)
  return least(fleet, limit, fleet.cost, fleet.occupied)
end
