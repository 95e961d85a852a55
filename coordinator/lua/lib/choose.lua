-- The policies. `fleet` holds parallel arrays over the candidates: name, active, backlog, owned, capacity, matched,
-- credit (what the matched tokens are worth on the medium that holds them, and what can be loaded beyond them), and
-- held_tokens, the most that any of them holds. Each policy returns the index chosen; ties fall to chance (the caller
-- seeds it).

-- No replica above max(min_slack, load_factor * mean) active requests is chosen while another is below.
local function guard_limit(fleet, knobs)
  local total = 0
  for i = 1, fleet.count do
    total = total + fleet.active[i]
  end
  local limit = math.max(knobs.min_slack, knobs.load_factor * total / fleet.count)
  if knobs.max_active > 0 then
    limit = math.min(limit, knobs.max_active)
  end
  for i = 1, fleet.count do
    if fleet.active[i] < limit then
      return limit
    end
  end
  return math.huge
end

-- The least of `cost`, among equals the least of `tie`, among those a random one.
local function least(fleet, limit, cost, tie)
  local best, equals
  for i = 1, fleet.count do
    if fleet.active[i] < limit then
      if best == nil or cost[i] < cost[best] or (cost[i] == cost[best] and tie[i] < tie[best]) then
        best, equals = i, 1
      elseif cost[i] == cost[best] and tie[i] == tie[best] then
        equals = equals + 1
        if math.random(equals) == 1 then
          best = i
        end
      end
    end
  end
  return best
end

-- What each cache is believed to hold. One that is nearly full counts as full: what is in it goes up and down with
-- every prompt, and the difference is no reason to spare one of them for ever.
local function occupied_tokens(fleet)
  local occupied = {}
  for i = 1, fleet.count do
    local owned, capacity = fleet.owned[i], fleet.capacity[i]
    occupied[i] = capacity > 0 and owned > 0.96 * capacity and capacity or owned
  end
  return occupied
end

-- In tokens, on every candidate (why: docs/adr/0002-placing.md):
--   backlog + 3 * charged + displaced + load
-- Charged: what the replica has to compute. Of a prefix that other requests share, what it lacks is charged at this
-- request's share of it: computed once, later requests hit it there too. But a copy takes cache: its share never
-- falls below copy_weight times the part of the cache it takes. A prefix nobody else has used is charged in full. Of a
-- replica that does not say how much it holds, ASSUMED_CAPACITY_TOKENS stands for that: not to share at all would leave
-- all conversations with whoever holds their system prompt.
-- Displaced: what of a copy, or of a prompt that nobody holds, finds the cache full, and pushes out something that
-- somebody will compute again. An owner is never charged for what every replica would have to compute: while all are
-- idle, the owner with most credit (on the GPU, a deepest one) is always the cheapest. What LMCache's store has, every
-- replica that loads from it lacks equally little: then the load decides.
-- Load: request_cost_tokens for each request in flight, and a tenth of what is new to every cache: large contexts that
-- somebody has to compute are better kept where less is going on, as they will be asked for again there.
local ASSUMED_CAPACITY_TOKENS = 100000

local function prefix_costs(fleet, occupied, prompt_tokens, hits, knobs)
  local cost, charged, displaced, load = {}, {}, {}, {}
  local best_tokens = fleet.held_tokens
  for i = 1, fleet.count do
    if fleet.credit[i] > best_tokens then
      best_tokens = fleet.credit[i]
    end
  end
  local request_cost = knobs.request_cost_tokens + 0.1 * (prompt_tokens - best_tokens)
  for i = 1, fleet.count do
    local lacks, capacity = best_tokens - fleet.credit[i], fleet.capacity[i]
    if lacks < 0 then
      lacks = 0
    end
    local share = 1
    if hits > 0 then
      local holds = capacity > 0 and capacity or ASSUMED_CAPACITY_TOKENS
      share = math.max(1 / (1 + hits), math.min(1, knobs.copy_weight * lacks / holds))
    end
    charged[i] = prompt_tokens - best_tokens + lacks * share
    displaced[i] = 0
    if capacity > 0 then
      local copied = prompt_tokens
      if fleet.held_tokens > 0 then
        copied = math.max(lacks, fleet.held_tokens - fleet.matched[i]) * share
      end
      displaced[i] = math.max(0, occupied[i] + copied - capacity)
    end
    load[i] = request_cost * fleet.active[i]
    cost[i] = fleet.backlog[i] + 3 * charged[i] + displaced[i] + load[i]
  end
  return cost, charged, displaced, load
end

local function power_of_two(fleet)
  local a = math.random(fleet.count)
  if fleet.count == 1 then
    return a
  end
  local b = (a + math.random(fleet.count - 1) - 1) % fleet.count + 1
  return fleet.active[b] < fleet.active[a] and b or a
end

-- The first of the rendezvous order that is a candidate and not above the load guard.
local function first_in_order(fleet, order, limit)
  local index = {}
  for i = 1, fleet.count do
    index[fleet.name[i]] = i
  end
  for replica in string.gmatch(order, '%S+') do
    local i = index[replica]
    if i and fleet.active[i] < limit then
      return i
    end
  end
  return math.random(fleet.count)
end
