-- The decision, for people: every candidate's cost with its terms.
local listed = {}
for i = 1, #pick.names do
  local name = pick.names[i]
  listed[i] = {
    replica = name, active = fleet.active[i], backlog_tokens = fleet.backlog[i],
    owned_tokens = fleet.owned[i], capacity_tokens = fleet.capacity[i], matched_keys = pick.depth[name] or 0,
    matched_tokens = fleet.matched[i], credit_tokens = fleet.credit[i], charged_tokens = fleet.terms.charged[i],
    displaced_tokens = fleet.terms.displaced[i], load_tokens = fleet.terms.load[i], cost = fleet.cost[i],
    cpu_credit = fleet.cpu_credit[i], store_credit = fleet.store_credit[i],
    guarded = fleet.guarded[i] >= pick.limit, speed = fleet.speed and fleet.speed[i] or nil,
    has_room = room_share == 0 or has_room(name, fleet.active[i], fleet.backlog[i], room_share),
  }
end
return { 'ok', cjson.encode({
  policy = policy, replica = replica, incarnation = incarnation, why = why, matched_tokens = matched_tokens,
  prompt_tokens = prompt_tokens, stored_tokens = pick.stored_tokens, shared_hits = pick.hits, must_wait = waits ~= nil,
  waits = waits, limits = asked and budget.left(asked, now) or nil, replicas = listed,
}) }
