-- Limits of a tenant over all gateways: requests in flight, and requests and tokens a minute. One hash holds them for all
-- pools of this Redis; in a Redis Cluster, each pool has its own.
--   tenants             "active <tenant>" -> its requests in flight; "active <tenant> <pool>" -> those of one pool;
--                       "requests <tenant>", "tokens <tenant>" -> when this bucket is empty (ms, with three decimals),
--                       and behind these decimals when this was written (ms, 13 digits): to other readers it is one number
--   budgets:<gateway>   reservation or seat -> "<tenant> <tokens> <tokens_per_min> <1 while in flight, else 0>"
-- Requests and tokens a minute are leaky buckets (the generic cell rate algorithm, ITU-T I.371). A bucket holds what a
-- minute allows, and this leaks out evenly within a minute. A request is let in if a bucket has room for one more request,
-- and the other one for a token. So the last request may overfill the bucket of tokens, and others wait until that has leaked:
-- all of it, because it is no more than one request can take. Tokens are prompt tokens that no cache has, and those of the
-- answer: the most at first, corrected when the answer has told.

-- include safe

-- The limits of these two hashes, as functions. Most requests have no limits, so these are made only when needed.
local function budget_of(budgets_key, tenants_key)
  local budget = {}
  local MINUTE_MS, LATE_S, ROUNDING_MS = 60000, 3600, 0.5
  local KINDS, DATED = { 'requests', 'tokens' }, '^(%d+%.%d%d%d)(' .. string.rep('%d', 13) .. ')$'

  local function set_empty_at(kind, tenant, at, now)
    write('HSET', tenants_key, kind .. ' ' .. tenant, string.format('%.3f%013d', at, now))
  end

  -- When a bucket is empty; `now` if it is, or cannot be read. If it was written later than now, the clock went back: what
  -- was in the bucket then is in it now.
  local function empty_at(kind, tenant, now)
    local at, written = string.match(field_of(tenants_key, kind .. ' ' .. tenant) or '', DATED)
    at = tonumber(at or 0)
    local ahead_ms = tonumber(written or 0) - now
    if ahead_ms > 0 then
      at = math.max(at - ahead_ms, now)
      set_empty_at(kind, tenant, at, now)
    end
    return math.max(at, now)
  end

  local function pour(kind, tenant, amount, per_min, now)
    if per_min > 0 and amount ~= 0 then
      set_empty_at(kind, tenant, math.max(0, empty_at(kind, tenant, now) + amount * MINUTE_MS / per_min), now)
    end
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
    return string.match(field_of(budgets_key, reservation) or '', '^(%S+) (%d+) (%d+) ([01])')
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

  -- What is left: requests, ms until their bucket is empty, tokens, ms; -1 where there is no limit. Then the requests in
  -- flight, if these are limited.
  function budget.left(asked, now)
    local left = {}
    for i, kind in ipairs(KINDS) do
      local per_min, ms = asked[kind], empty_at(kind, asked.tenant, now) - now
      local free = math.floor((MINUTE_MS - ms + ROUNDING_MS) * per_min / MINUTE_MS)
      left[2 * i - 1] = per_min == 0 and -1 or math.min(per_min, math.max(0, free))
      left[2 * i] = math.ceil(ms)
    end
    left[5] = asked.concurrency > 0 and sum_of(field_of(tenants_key, 'active ' .. asked.tenant)) or nil
    return string.format(left[5] and '%d %d %d %d %d' or '%d %d %d %d', unpack(left))
  end

  -- Takes the most that a request can need, once for a request. `in_flight`: it was placed; otherwise it has a seat.
  function budget.reserve(reservation, asked, uncached, now, in_flight)
    local tenant, tokens, per_min, was_in_flight = entry_of_budget(reservation)
    if not tenant then
      tenant, tokens, per_min, was_in_flight = asked.tenant, uncached + asked.output_tokens, asked.tokens, '0'
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

  local BUDGET = '^(%S+) (%d+) (%d+) ([%d.]+) (%d+)$'

  -- Pours what a gateway let in by itself, and returns the tenant, tokens and tokens_per_min. `text` is "<tenant> <tokens>
  -- <tokens_per_min> <requests> <requests_per_min>", where the requests are those that nobody has counted yet.
  local function pour_budget(text, now, is_known)
    local tenant, tokens, per_min, requests, requests_per_min = string.match(text, BUDGET)
    if tenant and not is_known then
      pour('tokens', tenant, tonumber(tokens), tonumber(per_min), now)
      pour('requests', tenant, tonumber(requests), tonumber(requests_per_min), now)
    end
    return tenant, tokens, per_min
  end

  -- A request that a gateway let in by itself is over, or many are ("-"). If it was placed here, too, that has counted it.
  function budget.spend(reservation, text, now)
    if entry_of_budget(reservation) then
      local _, tokens = string.match(text, BUDGET)
      budget.finish(reservation, tonumber(tokens), now)
    else
      pour_budget(text, now, false)
    end
  end

  -- A gateway states a request in flight. `text` is as above; "" if its tenant has no limits.
  function budget.restate(reservation, text, now)
    local known, known_tokens, _, in_flight = entry_of_budget(reservation)
    local tenant, tokens, per_min = pour_budget(text, now, known)
    if tenant then
      if in_flight ~= '1' then
        count(tenant, 1)
        set_entry(reservation, tenant, known_tokens or tokens, per_min, '1')
      end
      redis.pcall('PERSIST', budgets_key)
    end
  end
  return budget
end
