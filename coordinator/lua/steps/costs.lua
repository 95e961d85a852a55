-- What the candidates cost, for whoever asks why. The arrays of `fleet` are told as they are: tables of each candidate, or
-- a text, would take Redis three times as long. In a reply, numbers lose their fractions.
local terms, speeds_told = fleet.terms, fleet.speed and {} or nil
for i = 1, fleet.speed and fleet.count or 0 do
  speeds_told[i] = tostring(fleet.speed[i])
end
costs = {
  pick.names, fleet.active, fleet.backlog, fleet.matched, terms.charged, terms.displaced, terms.load, fleet.cost,
  speeds_told,
}
