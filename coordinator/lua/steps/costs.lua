-- What the candidates cost, for somebody who watches.
local listed, terms = {}, fleet.terms
for i = 1, #pick.names do
  listed[i] = {
    pick.names[i], fleet.active[i], fleet.backlog[i], fleet.matched[i], math.floor(terms.charged[i]),
    math.floor(terms.displaced[i]), math.floor(terms.load[i]), math.floor(fleet.cost[i]),
    fleet.speed and fleet.speed[i] or nil,
  }
end
costs = cjson.encode(listed)
