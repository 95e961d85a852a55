-- Limits of accounts over all gateways: requests in flight, and requests and tokens a minute. A request is charged to its
-- tenant's account and to its API key's, if these have limits, and is let in if each of them lets it in. One hash holds
-- all accounts for all pools of this Redis; in a Redis Cluster, each pool has its own. coordinator/README.md tells what it
-- and `budgets` hold. Readers of `budgets` ignore more words of an account. A version that knows only one account reads
-- the first one.
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

  local function set_empty_at(kind, account, at, now)
    write('HSET', tenants_key, kind .. ' ' .. account, string.format('%.3f%013d', at, now))
  end

  -- When a bucket is empty; `now` if it is, or cannot be read. If it was written later than now, the clock went back: what
  -- was in the bucket then is in it now.
  local function empty_at(kind, account, now)
    local at, written = string.match(field_of(tenants_key, kind .. ' ' .. account) or '', DATED)
    at = tonumber(at or 0)
    local ahead_ms = tonumber(written or 0) - now
    if ahead_ms > 0 then
      at = math.max(at - ahead_ms, now)
      set_empty_at(kind, account, at, now)
    end
    return math.max(at, now)
  end

  local function pour(kind, account, amount, per_min, now)
    if per_min > 0 and amount ~= 0 then
      set_empty_at(kind, account, math.max(0, empty_at(kind, account, now) + amount * MINUTE_MS / per_min), now)
    end
  end

  -- Counts requests in flight.
  local function count(accounts, by)
    local pool = string.match(budgets_key, '{(.-)}')
    for i = 1, #accounts do
      local active = 'active ' .. accounts[i].name
      for _, field in ipairs({ active, active .. ' ' .. pool }) do
        local sum = redis.pcall('HINCRBY', tenants_key, field, by)
        if type(sum) == 'number' and sum <= 0 then
          redis.call('HDEL', tenants_key, field)
        end
      end
    end
  end

  -- The accounts of an entry, its tokens, and whether it is in flight; nil if it cannot be read.
  local function entry_of_budget(reservation)
    local text = field_of(budgets_key, reservation)
    local name, tokens, per_min, in_flight, others = string.match(text or '', '^(%S+) (%d+) (%d+) ([01])(.*)$')
    if name then
      local accounts = { { name = name, tokens = tonumber(per_min) } }
      if others ~= '' then
        for other, its_per_min in string.gmatch(others, ' / (%S+) (%d+)') do
          accounts[#accounts + 1] = { name = other, tokens = tonumber(its_per_min) }
        end
      end
      return accounts, tonumber(tokens), in_flight == '1'
    end
  end

  local function set_entry(reservation, accounts, tokens, in_flight)
    local first = accounts[1]
    local text = string.format('%s %d %d %s', first.name, tokens, first.tokens, in_flight and '1' or '0')
    for i = 2, #accounts do
      text = text .. string.format(' / %s %d', accounts[i].name, accounts[i].tokens)
    end
    write('HSET', budgets_key, reservation, text)
  end

  -- What a request with limits asks for; nil if there are none. `key` is its key's account, if that has a concurrency.
  function budget.asked(text)
    local output_tokens, admitted = string.match(text, '^(%d+) ([01])')
    local accounts, key = {}, nil
    for name, concurrency, requests, tokens in string.gmatch(text, ' / (%S+) (%d+) (%d+) (%d+)') do
      local account = {
        name = name, concurrency = tonumber(concurrency), requests = tonumber(requests), tokens = tonumber(tokens),
      }
      accounts[#accounts + 1] = account
      key = account.concurrency > 0 and string.find(name, '^key:') and name or key
    end
    return accounts[1] and {
      accounts = accounts, key = key, output_tokens = tonumber(output_tokens), is_admitted = admitted == '1',
    }
  end

  -- The account that has as many requests in flight as it may have, the key's first; nil if none has.
  function budget.at_limit(asked)
    for i = #asked.accounts, 1, -1 do
      local account = asked.accounts[i]
      if account.concurrency > 0 and sum_of(field_of(tenants_key, 'active ' .. account.name)) >= account.concurrency then
        return account.name
      end
    end
  end

  -- Which account and which of its buckets keep a new request out for longest, and for how long (ms); nil if it is let in.
  function budget.refusal(asked, now)
    local longest_ms, which, of = ROUNDING_MS, nil, nil
    for i, account in ipairs(asked.accounts) do
      for _, kind in ipairs(KINDS) do
        local per_min = account[kind]
        if per_min > 0 then
          local amount = kind == 'requests' and MINUTE_MS / per_min or 1
          local over_ms = empty_at(kind, account.name, now) + amount - now - MINUTE_MS
          if over_ms > longest_ms then
            longest_ms, which, of = over_ms, kind, i
          end
        end
      end
    end
    if which then
      return of, which, math.ceil(longest_ms)
    end
  end

  -- What is left of each account, with " / " in between: requests, ms until their bucket is empty, tokens, ms; -1 where
  -- there is no limit. Then the requests in flight, if these are limited.
  function budget.left(asked, now)
    local text
    for _, account in ipairs(asked.accounts) do
      local left = {}
      for i, kind in ipairs(KINDS) do
        local per_min, ms = account[kind], empty_at(kind, account.name, now) - now
        local free = math.floor((MINUTE_MS - ms + ROUNDING_MS) * per_min / MINUTE_MS)
        left[2 * i - 1] = per_min == 0 and -1 or math.min(per_min, math.max(0, free))
        left[2 * i] = math.ceil(ms)
      end
      left[5] = account.concurrency > 0 and sum_of(field_of(tenants_key, 'active ' .. account.name)) or nil
      local told = string.format(left[5] and '%d %d %d %d %d' or '%d %d %d %d', unpack(left))
      text = text and text .. ' / ' .. told or told
    end
    return text
  end

  -- Takes the most that a request can need, once for a request. `in_flight`: it was placed; otherwise it has a seat.
  function budget.reserve(reservation, asked, uncached, now, in_flight)
    local accounts, tokens, was_in_flight = entry_of_budget(reservation)
    if not accounts then
      accounts, tokens = asked.accounts, uncached + asked.output_tokens
      for _, account in ipairs(accounts) do
        pour('requests', account.name, 1, account.requests, now)
        pour('tokens', account.name, tokens, account.tokens, now)
      end
    end
    if in_flight and not was_in_flight then
      count(accounts, 1)
    end
    set_entry(reservation, accounts, tokens, in_flight or was_in_flight)
  end

  -- The next attempt of a request: it is not in flight, and pays nothing again.
  function budget.move(before, after)
    local accounts, tokens, in_flight = entry_of_budget(before)
    if accounts then
      redis.call('HDEL', budgets_key, before)
      set_entry(after, accounts, tokens, false)
      if in_flight then
        count(accounts, -1)
      end
    end
  end

  -- Ends a reservation. `used` are the tokens that it took; nil if that is not known. Returns its accounts if it was in
  -- flight.
  function budget.finish(reservation, used, now)
    local accounts, tokens, in_flight = entry_of_budget(reservation)
    redis.pcall('HDEL', budgets_key, reservation)
    for i = 1, used and accounts and #accounts or 0 do
      pour('tokens', accounts[i].name, used - tokens, accounts[i].tokens, now)
    end
    if in_flight then
      count(accounts, -1)
      return accounts
    end
  end

  -- The gateway has gone. If it comes back, it may still tell what the request took.
  function budget.lapse(reservation)
    local accounts, tokens, in_flight = entry_of_budget(reservation)
    if in_flight then
      count(accounts, -1)
      set_entry(reservation, accounts, tokens, false)
    end
    redis.pcall('EXPIRE', budgets_key, LATE_S)
  end

  -- Pours what a gateway let in by itself, unless it `is_known`, and returns the accounts and the tokens. `text` is
  -- "<tokens> <requests that nobody has counted yet>", and for each account " / <account> <tokens_per_min>
  -- <requests_per_min>".
  local function pour_budget(text, now, is_known)
    local tokens, requests = string.match(text, '^(%d+) ([%d.]+)')
    local accounts = {}
    for name, per_min, requests_per_min in string.gmatch(text, ' / (%S+) (%d+) (%d+)') do
      accounts[#accounts + 1] = { name = name, tokens = tonumber(per_min) }
      if not is_known then
        pour('tokens', name, tonumber(tokens), tonumber(per_min), now)
        pour('requests', name, tonumber(requests), tonumber(requests_per_min), now)
      end
    end
    return accounts, tonumber(tokens)
  end

  -- A request that a gateway let in by itself is over, or many are ("-"). If it was placed here, too, that has counted it.
  function budget.spend(reservation, text, now)
    if entry_of_budget(reservation) then
      budget.finish(reservation, tonumber(string.match(text, '^%d+')), now)
    else
      pour_budget(text, now, false)
    end
  end

  -- A gateway states a request in flight. `text` is as above; "" if it has no limits.
  function budget.restate(reservation, text, now)
    local known, known_tokens, in_flight = entry_of_budget(reservation)
    local accounts, tokens = pour_budget(text, now, known)
    if accounts[1] then
      if not in_flight then
        count(accounts, 1)
        set_entry(reservation, accounts, known_tokens or tokens, true)
      end
      redis.pcall('PERSIST', budgets_key)
    end
  end
  return budget
end
