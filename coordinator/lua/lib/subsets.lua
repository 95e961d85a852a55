-- Subsets of the replicas: those that serve one model name, named by the digest of their names (Envoy's word). A subset
-- of at most LOOK_AT_ALL replicas has no orders: a placement looks at each of them. A larger subset has orders, so that
-- a placement looks at a few candidates only: coordinator/README.md tells what each holds. In `subsets`, a subset of 0
-- replicas is not declared as a whole yet. Gateways of an older version change no order; `reorder` corrects what they leave.

-- include safe

local LOOK_AT_ALL, LOAD_PER_REQUEST, UNKNOWN_ROOM = 16, 128, 1e12
local FULL_SHARE = 0.96 -- a cache that is fuller counts as full: see candidates
local MAX_OPENINGS = 12 -- a breaker stays open for at most probe_ms times this; one that says longer counts as over

-- The beginning of the keys of one pool, from any of them.
local function base_of(key)
  return string.match(key, '^(.*}:)')
end

-- A replica's scores in the orders :in_flight and :load.
local function load_scores(active, backlog)
  return active + math.min(backlog, 999999999) / 1e9, string.format('%d', backlog + LOAD_PER_REQUEST * active)
end

-- Orders a replica anew in its subsets after its load has changed. `active_by` is by how much its requests in flight
-- did.
local function reorder_load(base, digests, replica, active, backlog, active_by)
  local in_flight, load = load_scores(active, backlog)
  for digest in string.gmatch(digests, '%S+') do
    local subset = base .. 'subset:' .. digest
    redis.pcall('ZADD', subset .. ':in_flight', 'XX', in_flight, replica)
    local is_good = redis.pcall('ZADD', subset .. ':load', 'XX', 'CH', load, replica)
    if active_by ~= 0 and is_good == 1 then
      redis.pcall('HINCRBY', base .. 'subset_active', digest, active_by)
    end
  end
end

-- Notes that a replica is in a subset that has orders.
local function note_subset(subsets_of_key, replica, digest)
  local digests = field_of(subsets_of_key, replica) or ''
  if not string.find(' ' .. digests .. ' ', ' ' .. digest .. ' ', 1, true) then
    write('HSET', subsets_of_key, replica, digests == '' and digest or digests .. ' ' .. digest)
  end
end

-- How many members a sorted set has; 0 if it is of another type.
local function size_of(key)
  local size = redis.pcall('ZCARD', key)
  return type(size) == 'number' and size or 0
end

-- Puts a replica where it belongs in all its orders, after its record or its breaker has changed. A breaker that says
-- that it is open for longer than longest_open_ms counts as over. `digests` are those of its subsets if not all are
-- meant.
local function stand(base, replica, now, longest_open_ms, digests)
  digests = digests or field_of(base .. 'subsets_of', replica)
  if not digests then
    return
  end
  local state, capacity = string.match(field_of(base .. 'replicas', replica) or '', '^%S+ (%S+) (%d+) %d+ %d+ %S')
  local open_until = tonumber(string.match(field_of(base .. 'breakers', replica) or '', '^%d+ (%d+)') or 0)
  local is_good = state == 'ready' and not (open_until > now and open_until <= now + longest_open_ms)
  local active, backlog = sum_of(field_of(base .. 'active', replica)), sum_of(field_of(base .. 'backlog_tokens', replica))
  local owned, holds = sum_of(field_of(base .. 'owned_tokens', replica)), tonumber(capacity or 0)
  local in_flight, load = load_scores(active, backlog)
  local free = holds == 0 and UNKNOWN_ROOM - owned or (owned > FULL_SHARE * holds and 0 or holds - owned)
  for digest in string.gmatch(digests, '%S+') do
    local subset = base .. 'subset:' .. digest
    local before = redis.pcall('ZSCORE', subset .. ':in_flight', replica)
    local counted = type(before) == 'string' and math.floor(tonumber(before)) or 0
    if is_good then
      write('ZADD', subset .. ':good', 0, replica)
      write('ZADD', subset .. ':in_flight', in_flight, replica)
      write('ZADD', subset .. ':load', load, replica)
      write('ZADD', subset .. ':free', string.format('%d', free), replica)
    else
      redis.pcall('ZREM', subset .. ':good', replica)
      redis.pcall('ZREM', subset .. ':in_flight', replica)
      redis.pcall('ZREM', subset .. ':load', replica)
      redis.pcall('ZREM', subset .. ':free', replica)
    end
    if state and not is_good then
      write('ZADD', subset .. ':out', state == 'ready' and open_until or 'inf', replica)
    else
      redis.pcall('ZREM', subset .. ':out', replica)
    end
    local by = (is_good and active or 0) - counted
    if by ~= 0 then
      redis.pcall('HINCRBY', base .. 'subset_active', digest, string.format('%d', by))
    end
  end
end
