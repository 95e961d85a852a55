-- In a large fleet, one of a prompt's few owners is chosen at once if every other replica must cost more: the tokens that
-- it lacks alone do.
local owners, others_reach = few_owners(deepest, start, not explain)
local names, depth, held = owners and orders.good_owners(owners) or {}, {}, {}
if #names > 0 then
  for replica, record in pairs(owners) do
    depth[replica], held[replica] = deepest, record
  end
  local owner = picked(names, depth, held, deepest)
  local has_answer = answered > 0 and answered <= others_reach
  local reach = math.max(tokens_at(others_reach), has_answer and tokens_at(answer_end) or 0)
  local others_cost = owner.limit ~= math.huge and least_cost_elsewhere(owner.fleet, reach, owner.hits)
  if others_cost and owner.fleet.cost[owner.at] <= others_cost then
    pick = owner
  end
end
