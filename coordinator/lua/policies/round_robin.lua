-- Each replica in turn, in one sequence for all gateways.

WEIGHS_CACHES = false

local function next_turn()
  local turn = redis.pcall(explain and 'GET' or 'INCR', turn_key) or 0
  return (type(turn) ~= 'table' and tonumber(turn) or seed) + (explain and 0 or -1) -- a table is an error
end

local is_nominated = false

function nominate(orders)
  is_nominated = true
  return { orders.good_from(next_turn() % math.max(1, orders.count), 1) }
end

function choose(fleet)
  return is_nominated and 1 or next_turn() % fleet.count + 1
end
