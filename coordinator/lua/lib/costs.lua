-- What candidates cost. `fleet` holds parallel arrays over the candidates: name, active, backlog, owned, capacity,
-- occupied, matched (tokens), likely (the same with the last answer, where it was most likely made) and credit (what
-- likely tokens are worth on their medium, plus what can be loaded beyond them). It also has three numbers: count,
-- held_tokens (the most that any candidate has matched) and mean_active (of the good replicas of the subset).
-- If the replicas are not equally fast, it has speed, too: of the mean. `guarded` is what the load guard compares: active,
-- or active by speed.

local CHARGED_WEIGHT = 3
-- The load guard. An engine batches a few requests at little cost. Above that, a replica may have half as many more than
-- the mean: less would move prompts away from where they are cached, and more would make them wait.
local MIN_SLACK_REQUESTS, LOAD_FACTOR = 8, 1.5
local REQUEST_COST_TOKENS, COPY_WEIGHT = 128, 16 -- docs/adr/0002-placing.md says how they were found

-- include speeds

-- A replica with this many active requests or more is not chosen while another one has fewer. A request that can wait may
-- choose one that is full.
local function most_active(mean_active)
  local limit = math.max(MIN_SLACK_REQUESTS, LOAD_FACTOR * mean_active)
  return max_active_requests > 0 and room_share == 0 and math.min(limit, max_active_requests) or limit
end

-- The limit for these candidates; none if all of them are above it.
local function guard_limit(fleet)
  local limit = most_active(fleet.mean_active)
  for i = 1, fleet.count do
    if fleet.guarded[i] < limit then
      return limit
    end
  end
  return math.huge
end

-- The index with the least `cost`; among equals the one with the least `tie`; among those a random one.
local function least(fleet, limit, cost, tie)
  local best, equals
  for i = 1, fleet.count do
    if fleet.guarded[i] < limit then
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

-- The cost of each candidate, in tokens (why: docs/adr/0002-placing.md):
--   backlog + CHARGED_WEIGHT * charged + displaced + load
-- charged: the tokens that the replica has to compute. If other requests share the prefix, its missing tokens are
-- charged in part: once computed, later requests hit them there, too. But a copy takes room in the cache, so this share
-- never falls below COPY_WEIGHT times the part of the cache that the copy takes. A prefix that no other request has
-- used is charged in full. If a replica does not say how much it holds, ASSUMED_CAPACITY_TOKENS is used: with no share
-- at all, every conversation would stay on the replica that holds its system prompt.
-- displaced: the tokens of a copy, or of a prompt that no replica holds, for which the cache has no room. They push out
-- tokens that a later request will compute again. An owner is not charged for tokens that every replica would have to
-- compute. So while all are idle, the owner with the most credit (on the GPU, a deepest one) is always the cheapest.
-- All replicas that can load LMCache's chunks miss the same small part of them. Then the load decides.
-- load: REQUEST_COST_TOKENS for each request in flight, and a tenth of the tokens that no cache has. A large context
-- that must be computed anyway is better placed where there is less to do, because later requests will follow it there.
-- A fast replica needs less time for it. So if the replicas are not equally fast, the sum is divided by the speed: it is in
-- tokens of a replica of mean speed. Of the tokens that every replica has to compute, only their own time is divided: the
-- weight is there to compare replicas that lack more with those that lack less.
local ASSUMED_CAPACITY_TOKENS = 100000

local function prefix_costs(fleet, hits)
  local cost, terms = {}, (explain or tells_costs == 1) and { charged = {}, displaced = {}, load = {} } or nil
  local best_tokens = fleet.held_tokens
  for i = 1, fleet.count do
    if fleet.credit[i] > best_tokens then
      best_tokens = fleet.credit[i]
    end
  end
  local request_cost = REQUEST_COST_TOKENS + 0.1 * (prompt_tokens - best_tokens)
  for i = 1, fleet.count do
    local lacks, capacity = best_tokens - fleet.credit[i], fleet.capacity[i]
    if lacks < 0 then
      lacks = 0
    end
    local share = 1
    if hits > 0 then
      local holds = capacity > 0 and capacity or ASSUMED_CAPACITY_TOKENS
      share = math.max(1 / (1 + hits), math.min(1, COPY_WEIGHT * lacks / holds))
    end
    local charged, displaced = prompt_tokens - best_tokens + lacks * share, 0
    if capacity > 0 then
      local copied = prompt_tokens
      if fleet.held_tokens > 0 then
        copied = math.max(lacks, fleet.held_tokens - fleet.matched[i]) * share
      end
      displaced = math.max(0, fleet.occupied[i] + copied - capacity)
    end
    local load = request_cost * fleet.active[i]
    cost[i] = fleet.backlog[i] + CHARGED_WEIGHT * charged + displaced + load
    if terms then
      terms.charged[i], terms.displaced[i], terms.load[i] = charged, displaced, load
    end
  end
  for i = 1, fleet.speed and fleet.count or 0 do
    cost[i] = speeds.cost(cost[i], prompt_tokens - best_tokens, fleet.speed[i])
  end
  fleet.cost, fleet.terms, fleet.best_tokens = cost, terms, best_tokens
end

-- The least that a replica can cost that is none of the candidates, if it most likely holds no more than `reach_tokens`.
local function least_cost_elsewhere(fleet, reach_tokens, hits)
  local best = math.max(fleet.best_tokens, reach_tokens)
  local cost = CHARGED_WEIGHT * (prompt_tokens - best + (best - reach_tokens) / (1 + hits))
  return speeds and speeds.cost(cost, prompt_tokens - best, fleet.fastest) or cost
end
