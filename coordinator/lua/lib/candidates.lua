-- The candidates: the replicas that a placement looks at. In a subset of at most LOOK_AT_ALL replicas these are all. In
-- a larger one the policy nominates a few from the subset's orders, and owners of the prompt's chain may come to them.
-- For what was read of a replica:
--   record_of    its record; false if it has none
--   life_of_name the beginning of a record in own:<key> that is of its incarnation: "<incarnation> "; nil if its own
--                record cannot be read, or there is none
--   capacity_of, breaker_of
--   floor_of     nil if it is 0
--   state_of     nil if it is ready

-- include subsets
-- include tables

local record_of, life_of_name, floor_of, state_of, capacity_of, breaker_of = {}, {}, {}, {}, {}, {}
local has_breakers
local longest_open_ms = MAX_OPENINGS * probe_ms

-- Reads the records of replicas that were not read yet: those at every `step`-th place in `names`.
local function learn(names, step)
  local unread = {}
  for i = 1, #names, step do
    if record_of[names[i]] == nil then
      unread[#unread + 1] = names[i]
    end
  end
  if #unread == 0 then
    return
  end
  local records = redis.call('HMGET', replicas_key, unpack(unread))
  for i = 1, #unread do
    local replica, record = unread[i], records[i]
    record_of[replica] = record
    if record then
      local incarnation, state, capacity, floor = string.match(record, '^(%S+ )(%S+) (%d+) %d+ (%d+) %S')
      life_of_name[replica], capacity_of[replica] = incarnation, tonumber(capacity)
      if incarnation and state ~= 'ready' then
        state_of[replica] = state
      end
      if incarnation and floor ~= '0' then
        floor_of[replica] = tonumber(floor)
      end
    end
  end
end

-- Tells good, broken and dead replicas apart by their records and breakers. One that is drained is none of these, except
-- for requests that can go nowhere else. One that is asleep is none of these.
local function classify(names)
  local good, broken, dead = {}, {}, {}
  if #names == 0 then
    return good, broken, dead
  end
  learn(names, 1)
  if has_breakers == nil then
    has_breakers = has_any and redis.pcall('HLEN', breakers_key) ~= 0
  end
  local breakers = has_breakers and redis.pcall('HMGET', breakers_key, unpack(names)) or {}
  for i = 1, #names do
    local replica, is_open = names[i], false
    if breakers[i] then
      local open_until = tonumber(string.match(breakers[i], '^%d+ (%d+)')) or 0
      breaker_of[replica] = breakers[i]
      is_open = open_until > now and open_until <= now + longest_open_ms
    end
    local state = state_of[replica]
    if life_of_name[replica] and (not state or (state == 'draining' and replica == pinned)) then
      local tier = is_open and broken or good
      tier[#tier + 1] = replica
    elseif state and state ~= 'draining' and state ~= 'asleep' then
      dead[#dead + 1] = replica
    end
  end
  return good, broken, dead
end

-- include orders

-- The names to look at, and whether no replica is good. If none is good, the candidates are the ready ones whose breaker
-- is open. If there are none either, the dead and hung ones are: a try is better than a refusal. A tried replica is never
-- a candidate. `only` are the ones to look at, if not all are meant: members of the subset that were not tried.
local function candidates_of(subset, nominate, new_tokens, only)
  local good, broken, dead
  if pinned ~= '' then
    local is_member = not subset.is_tried[pinned] and type(redis.pcall('ZSCORE', subset.key, pinned)) == 'string'
    good, broken, dead = classify({ is_member and pinned or nil })
  elseif only then
    good, broken, dead = classify(only)
  elseif subset.orders then
    good, broken, dead = subset.orders.candidates(nominate, new_tokens)
  else
    local names = redis.pcall('ZRANGE', subset.key, 0, -1)
    for i = #names, tried ~= '' and 1 or math.huge, -1 do
      if subset.is_tried[names[i]] then
        table.remove(names, i)
      end
    end
    good, broken, dead = classify(names)
  end
  if #good > 0 then
    return good, false
  end
  return #broken > 0 and broken or dead, true
end

-- The subset with this digest; nil if no gateway has declared it. It has `orders` if these are to be used.
local function subset_of(digest)
  local count = string.match(field_of(subsets_key, digest) or '', '^(%d+) %d+$')
  if count and count ~= '0' then
    local subset = { digest = digest, key = subset_key, is_tried = tried ~= '' and set_of(tried) or {} }
    if tonumber(count) > LOOK_AT_ALL and pinned == '' then
      subset.orders = orders_of(subset, base_of(subset_key))
    end
    return subset
  end
end

-- The load of the candidates, as parallel arrays: see costs.
local function load_of(subset, names)
  local active, backlog = redis.pcall('HMGET', active_key, unpack(names)), redis.pcall('HMGET', backlog_tokens_key, unpack(names))
  local owned, capacity, occupied, total = redis.pcall('HMGET', owned_tokens_key, unpack(names)), {}, {}, 0
  for i = 1, #names do
    local requests, owns, holds = sum_of(active[i]), sum_of(owned[i]), capacity_of[names[i]]
    active[i], backlog[i], owned[i], capacity[i] = requests, sum_of(backlog[i]), owns, holds
    -- A nearly full cache counts as full, because its sum goes up and down with every prompt. Without this rule, a small
    -- difference could keep requests away from one replica for ever.
    occupied[i] = owns > FULL_SHARE * holds and holds > 0 and holds or owns
    total = total + requests
  end
  local fleet = {
    count = #names, name = names, active = active, backlog = backlog, owned = owned, capacity = capacity,
    occupied = occupied, mean_active = subset.orders and subset.orders.mean_active() or total / #names, guarded = active,
  }
  if speeds then
    speeds.note(fleet)
  end
  return fleet
end
