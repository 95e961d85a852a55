-- The chosen replica has no room: the best of those that have. If none has, the request waits. It may also wait if those
-- hold less of its prompt than the one that has none: `full` is what that costs.
local first, depth, held, top = pick, pick.depth, pick.held, pick.top
local roomy = with_room(pick.fleet, room_share)
if #roomy == 0 and subset.orders then
  local more = subset.orders.more_with_room(room_share)
  if #more > 0 then
    depth, held, top = walk(deepest, more, orders, not explain, start)
    roomy = with_room(load_of(subset, more), room_share)
  end
end
must_wait = #roomy == 0
if not must_wait then
  pick = picked(roomy, depth, held, top)
  local is_best = WEIGHS_CACHES and not is_kept and (depth[first.names[first.at]] or 0) == best_held
  full = is_best and (depth[pick.names[pick.at]] or 0) < best_held and first.fleet.cost[first.at] or nil
end
