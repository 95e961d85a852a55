-- Limits of a tenant over all gateways: requests in flight, and requests and tokens a minute. One hash holds them for all
-- pools of this Redis; in a Redis Cluster, each pool has its own.
--   tenants             "active <tenant>" -> its requests in flight; "active <tenant> <pool>" -> those of one pool;
--                       "requests <tenant>", "tokens <tenant>" -> when this bucket is empty (ms)
--   budgets:<gateway>   reservation or seat -> "<tenant> <tokens> <tokens_per_min> <1 while in flight, else 0>"
-- Requests and tokens a minute are leaky buckets (the generic cell rate algorithm, ITU-T I.371). A bucket holds what a
-- minute allows, and this leaks out evenly within a minute. A request is let in if a bucket has room for one more request,
-- and the other one for a token. So the last request may overfill the bucket of tokens, and others wait until that has leaked. Tokens are
-- prompt tokens that no cache has, and those of the answer: estimated at first, corrected when the answer has told.

-- include safe

-- The limits of these two hashes, as functions. Most requests have no limits, so these are made only when needed.
local function budget_of(budgets_key, tenants_key)
  local budget = {}
  local MINUTE_MS, LONGEST_DEBT_MS, LATE_S, ROUNDING_MS = 60000, 600000, 3600, 0.5
  local KINDS = { 'requests', 'tokens' }

  -- When a bucket is empty; `now` if it is. A time that is too far ahead was written before the clock went back.
  local function empty_at(kind, tenant, now)
    local at = sum_of(field_of(tenants_key, kind .. ' ' .. tenant))
    if at > now + LONGEST_DEBT_MS then
      at = now + LONGEST_DEBT_MS
      write('HSET', tenants_key, kind .. ' ' .. tenant, string.format('%d', at))
    end
    return math.max(at, now)
  end

  local function pour(kind, tenant, amount, per_min, now)
    if per_min > 0 and amount ~= 0 then
      local at = empty_at(kind, tenant, now) + amount * MINUTE_MS / per_min
      write('HSET', tenants_key, kind .. ' ' .. tenant, string.format('%.3f', math.min(at, now + LONGEST_DEBT_MS)))
    end
  end

  -- So many tokens of an estimate that the bucket takes them all: what ends gives back as many as it took.
  local function taken(tenant, tokens, per_min, now)
    if per_min == 0 then
      return tokens
    end
    local room_ms = now + LONGEST_DEBT_MS - empty_at('tokens', tenant, now)
    return math.min(tokens, math.floor(room_ms * per_min / MINUTE_MS))
  end

  -- Counts requests in flight.
  local function count(tenant, by)
    local active = 'active ' .. tenant
    for _, field in ipairs({ active, active .. ' ' .. string.match(budgets_key, '{(.-)}') }) do
      local sum = redis.pcall('HINCRBY', tenants_key, field, by)
      if type(sum) == 'number' and sum <= 0 then
        redis.call('HDEL', tenants_key, field)
      end
    end
  end

  local function entry_of_budget(reservation)
    return string.match(field_of(budgets_key, reservation) or '', '^(%S+) (%d+) (%d+) ([01])$')
  end

  local function set_entry(reservation, tenant, tokens, per_min, in_flight)
    write('HSET', budgets_key, reservation, string.format('%s %d %d %s', tenant, tokens, per_min, in_flight))
  end

  -- What a request of a tenant with limits asks for; nil if there are none.
  function budget.asked(text, line)
    local concurrency, requests, tokens, output_tokens, admitted = string.match(text, '^(%d+) (%d+) (%d+) (%d+) ([01])$')
    return concurrency and {
      tenant = string.match(line, '^%d+ (%S+)'), concurrency = tonumber(concurrency), requests = tonumber(requests),
      tokens = tonumber(tokens), output_tokens = tonumber(output_tokens), is_admitted = admitted == '1',
    }
  end

  -- Whether the tenant has as many requests in flight as it may have.
  function budget.is_at_limit(asked)
    return asked.concurrency > 0 and sum_of(field_of(tenants_key, 'active ' .. asked.tenant)) >= asked.concurrency
  end

  -- Which bucket keeps a new request out, and for how long (ms); nil if it is let in.
  function budget.refusal(asked, now)
    for _, kind in ipairs(KINDS) do
      local per_min = asked[kind]
      if per_min > 0 then
        local amount = kind == 'requests' and MINUTE_MS / per_min or 1
        local over_ms = empty_at(kind, asked.tenant, now) + amount - now - MINUTE_MS
        if over_ms > ROUNDING_MS then
          return kind, math.ceil(over_ms)
        end
      end
    end
  end

  -- What is left: requests, ms until their bucket is empty, tokens, ms; -1 where there is no limit.
  function budget.left(asked, now)
    local left = {}
    for i, kind in ipairs(KINDS) do
      local per_min, ms = asked[kind], empty_at(kind, asked.tenant, now) - now
      local free = math.floor((MINUTE_MS - ms + ROUNDING_MS) * per_min / MINUTE_MS)
      left[2 * i - 1] = per_min == 0 and -1 or math.min(per_min, math.max(0, free))
      left[2 * i] = math.ceil(ms)
    end
    return string.format('%d %d %d %d', unpack(left))
  end

  -- Takes what a request most likely needs, once for a request. `in_flight`: it was placed; otherwise it has a seat.
  function budget.reserve(reservation, asked, uncached, now, in_flight)
    local tenant, tokens, per_min, was_in_flight = entry_of_budget(reservation)
    if not tenant then
      tenant, tokens, per_min, was_in_flight = asked.tenant, uncached + asked.output_tokens, asked.tokens, '0'
      tokens = taken(tenant, tokens, per_min, now)
      pour('requests', tenant, 1, asked.requests, now)
      pour('tokens', tenant, tokens, per_min, now)
    end
    if in_flight and was_in_flight == '0' then
      count(tenant, 1)
    end
    set_entry(reservation, tenant, tokens, per_min, in_flight and '1' or was_in_flight)
  end

  -- The next attempt of a request: it is not in flight, and pays nothing again.
  function budget.move(before, after)
    local tenant, tokens, per_min, in_flight = entry_of_budget(before)
    if tenant then
      redis.call('HDEL', budgets_key, before)
      set_entry(after, tenant, tokens, per_min, '0')
      if in_flight == '1' then
        count(tenant, -1)
      end
    end
  end

  -- Ends a reservation. `used` are the tokens that it took; nil if that is not known. Returns the tenant if it was in flight.
  function budget.finish(reservation, used, now)
    local tenant, tokens, per_min, in_flight = entry_of_budget(reservation)
    redis.pcall('HDEL', budgets_key, reservation)
    if tenant and used then
      pour('tokens', tenant, used - tokens, tonumber(per_min), now)
    end
    if in_flight == '1' then
      count(tenant, -1)
      return tenant
    end
  end

  -- The gateway has gone. If it comes back, it may still tell what the request took.
  function budget.lapse(reservation)
    local tenant, tokens, per_min, in_flight = entry_of_budget(reservation)
    if in_flight == '1' then
      count(tenant, -1)
      set_entry(reservation, tenant, tokens, per_min, '0')
    end
    redis.pcall('EXPIRE', budgets_key, LATE_S)
  end

  -- A gateway states a request in flight: `text` is "<tenant> <tokens> <tokens_per_min>"; "" if its tenant has no limits.
  function budget.restate(reservation, text, now)
    local tenant, tokens, per_min = string.match(text, '^(%S+) (%d+) (%d+)$')
    if tenant then
      local known, _, _, in_flight = entry_of_budget(reservation)
      if not known then
        tokens = taken(tenant, tonumber(tokens), tonumber(per_min), now)
        pour('tokens', tenant, tonumber(tokens), tonumber(per_min), now)
      end
      if in_flight ~= '1' then
        count(tenant, 1)
        set_entry(reservation, tenant, tokens, per_min, '1')
      end
      redis.pcall('PERSIST', budgets_key)
    end
  end
  return budget
end
