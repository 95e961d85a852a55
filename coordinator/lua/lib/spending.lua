-- Budgets of accounts over all gateways: what they may spend in a day, a week or a month, in money or in tokens. Money is
-- counted in nanos. coordinator/README.md tells what the keys hold.
-- A gateway tells what it has settled as sums over its own life. The script adds what is new, so a call may be lost, or
-- run twice. It also tells the sum of all gateways that it has seen: a hash that was lost is raised to it.

-- include safe

-- The hash stands beside `tenants`: where a Redis user may reach only keys that a version before has named, a script that
-- declared it would be refused as a whole.
local function spending_of(tenants_key, leased_key)
  local spending_key = string.gsub(tenants_key, 'tenants$', 'spending')
  local spending, MTOK, LATE_S, SPENT_S = {}, 1e6, 3600, 86400

  local function number_of(text)
    local number = tonumber(text or 0)
    return number and number > 0 and number < 9e18 and number or 0 -- nan fails
  end

  -- `known` is what the field has at least, if it cannot be read.
  local function add(field, by, known)
    local sum = redis.pcall('HINCRBY', spending_key, field, string.format('%d', by))
    if type(sum) == 'number' and sum >= 0 then
      return sum
    end
    sum = math.max(0, known + by)
    write('HSET', spending_key, field, string.format('%d', sum))
    return sum
  end

  local function is_life(text)
    return text and string.find(text, '^%d+$')
  end

  -- Without a life, nobody can say whose sums these are: the hash counts as lost.
  local function life_now()
    local life = field_of(spending_key, 'life')
    if not is_life(life) then
      life = string.format('%d%06d', unpack(redis.call('TIME')))
      redis.call('UNLINK', spending_key)
      redis.call('HSET', spending_key, 'life', life)
    end
    return life
  end

  -- What a request costs at most on a replica that has `cached` tokens of its prompt: `bill` is as for `place`. If its
  -- model has a price, that is never nothing: its prompt may be unread, and a budget that is used up must refuse it. Returns
  -- what it takes of each budget, whether one of these is in its way, and what is spent of each: "<life>", and for each
  -- " / <settled> <held>".
  function spending.weigh(bill, uncached, cached)
    local fixed, output, uncached_price, cached_price, output_price, pace =
      string.match(bill, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)')
    local prompt_nanos = uncached * uncached_price + cached * cached_price
    local budgets, fields, is_over = {}, { 'life' }, false
    for name, limit in string.gmatch(bill, ' / (%S+) (%d+)') do
      local budget = { name = name, limit = tonumber(limit) }
      if string.find(name, '/money/', 1, true) then
        budget.prompt, budget.per_s = fixed + math.ceil(prompt_nanos / MTOK), math.ceil(pace * output_price / MTOK)
        budget.most = fixed + math.ceil((prompt_nanos + output * output_price) / MTOK)
        budget.most = math.max(budget.most, math.min(1, uncached_price + output_price))
      else
        budget.prompt, budget.per_s, budget.most = uncached, pace, math.max(1, uncached + output)
      end
      budgets[#budgets + 1] = budget
      fields[#fields + 1], fields[#fields + 2] = 'settled ' .. name, 'held ' .. name
    end
    local found = redis.pcall('HMGET', spending_key, unpack(fields))
    budgets.life = is_life(found[1]) and found[1]
    local told = budgets.life or '-'
    for i, budget in ipairs(budgets) do
      local settled, held = number_of(found[2 * i]), number_of(found[2 * i + 1])
      is_over = is_over or budget.most > 0 and settled + held + budget.most > budget.limit
      told = told .. string.format(' / %d %d', settled, held)
    end
    return budgets, is_over, told
  end

  local function give_back(entry, life)
    local of, is_lost = string.match(entry, '^(%d+)(%S*)')
    if of == life then
      local kind = is_lost ~= '' and 'settled ' or 'held '
      for name, most in string.gmatch(entry, ' / (%S+) (%d+) %d+ %d+') do
        add(kind .. name, -tonumber(most), 0)
      end
    end
  end

  -- Holds what an entry says, which begins behind its life, once.
  local function hold(reservation, life, entry)
    local text = life .. ' ' .. entry
    local before = field_of(leased_key, reservation)
    if before == text then
      return
    elseif before then
      give_back(before, life)
    end
    write('HSET', leased_key, reservation, text)
    for name, most in string.gmatch(entry, ' / (%S+) (%d+) %d+ %d+') do
      add('held ' .. name, tonumber(most), 0)
    end
  end

  -- Holds the most that a request takes of budgets, which was weighed just before. It holds nothing yet: a placement is
  -- refused when its gateway has stated its requests since.
  function spending.lease(reservation, budgets, now)
    local entry = { string.format('%s %d', budgets.life or life_now(), now) }
    for i, budget in ipairs(budgets) do
      entry[i + 1] = string.format('%s %d %d %d', budget.name, budget.most, budget.prompt, budget.per_s)
      add('held ' .. budget.name, budget.most, 0)
    end
    write('HSET', leased_key, reservation, table.concat(entry, ' / '))
  end

  -- A gateway states what a request in flight holds.
  function spending.restate(reservation, entry)
    hold(reservation, life_now(), entry)
  end

  -- A request is not in flight any more.
  function spending.free(reservation, life)
    local entry = field_of(leased_key, reservation)
    if entry then
      redis.call('HDEL', leased_key, reservation)
      give_back(entry, life or field_of(spending_key, 'life'))
    end
  end

  -- The same of all requests but these. The hash is made anew: so it lives longer than an hour if its gateway had gone.
  function spending.free_others(kept)
    local leased, life = redis.pcall('HGETALL', leased_key), field_of(spending_key, 'life')
    redis.call('UNLINK', leased_key)
    for i = 1, #leased, 2 do
      if kept[leased[i]] then
        redis.call('HSET', leased_key, leased[i], leased[i + 1])
      else
        give_back(leased[i + 1], life)
      end
    end
  end

  -- Holds the slices that a gateway states in `text`, which is as for spending.settle, and settles just before: so what has
  -- ended is held until it is settled. Behind the sum of a budget stand " <its limit> <what requests in flight on the
  -- slice hold: three numbers as in leased:<gateway>> <the three that it wants beyond>". What is in flight is held in any
  -- case. The gateway gets all that it wants beyond, but nothing when less is left than MUCH times what all gateways
  -- would want: near its end, each request of a budget is asked about. Adds to `told`, for each slice,
  -- "slice <budget>", 1 if it has got that, and "held <budget>", what is held of the budget.
  function spending.slice(text, gateways, now, told)
    local MUCH, stated = 4, ' / (%S+) %S+ %d+ %d+ %d+ (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)'
    for name, limit, held, known, per_s, more, more_known, more_per_s in string.gmatch(text, stated) do
      local slice, is_granted = 'slice ' .. name, false
      spending.free(slice, told[1])
      local found = redis.pcall('HMGET', spending_key, 'settled ' .. name, 'held ' .. name)
      local others = number_of(found[2])
      if tonumber(more) > 0 and number_of(found[1]) + others + held + MUCH * gateways * more <= tonumber(limit) then
        is_granted, held, known, per_s = true, held + more, known + more_known, per_s + more_per_s
      end
      if tonumber(held) > 0 then
        write('HSET', leased_key, slice, string.format('%s %d / %s %d %d %d', told[1], now, name, held, known, per_s))
        others = add('held ' .. name, held, others)
      end
      told[#told + 1], told[#told + 2] = slice, is_granted and '1' or '0'
      told[#told + 1], told[#told + 2] = 'held ' .. name, string.format('%d', others)
    end
  end

  -- The gateway has gone, and nobody knows what its request took. What it can have cost by `until_ms` counts as settled,
  -- until the gateway comes back and tells.
  function spending.lapse(reservation, until_ms)
    local entry = field_of(leased_key, reservation)
    local life, placed_ms = string.match(entry or '', '^(%d+) (%d+)')
    if life and life == field_of(spending_key, 'life') then
      local kept, seconds = life .. '/lost ' .. placed_ms, math.max(0, until_ms - tonumber(placed_ms)) / 1000
      for name, most, prompt, per_s in string.gmatch(entry, ' / (%S+) (%d+) (%d+) (%d+)') do
        local cost = math.min(tonumber(most), math.ceil(tonumber(prompt) + per_s * seconds))
        kept = kept .. string.format(' / %s %d 0 0', name, cost)
        add('settled ' .. name, cost, 0)
      end
      give_back(entry, life)
      redis.call('HSET', leased_key, reservation, kept)
    end
    redis.pcall('EXPIRE', leased_key, LATE_S)
  end

  -- The same of all that it held: a request may hold something and be nowhere in flight, because its replica is gone.
  function spending.lapse_others(until_ms)
    local leased = redis.pcall('HGETALL', leased_key)
    for i = 1, #leased, 2 do
      if not string.find(leased[i + 1], '^%d+/lost ') then
        spending.lapse(leased[i], until_ms)
      end
    end
  end

  -- Adds what a gateway process has settled. `text` has, for each of some hundred budgets, " / <budget> <life> <in all>
  -- <the part that this life has> <what all gateways had settled then>". Returns the life, and for each the budget and
  -- what is settled now.
  function spending.settle(spent_key, text)
    local life, names, news = life_now(), { '?' }, {}
    for name, of_life, in_all, had, seen in string.gmatch(text, ' / (%S+) (%S+) (%d+) (%d+) (%d+)') do
      names[#names + 1], news[#news + 1] = name, { of_life, in_all, had, seen }
    end
    local known = redis.pcall('HMGET', spent_key, unpack(names))
    local is_known, changed, told = known[1] == life, {}, { life }
    if not is_known then
      redis.call('UNLINK', spent_key)
      redis.call('HSET', spent_key, '?', life)
      redis.call('EXPIRE', spent_key, SPENT_S)
    end
    for i, new in ipairs(news) do
      local of_life, in_all, had, seen = unpack(new, 1, 4)
      local more, name = 0, names[i + 1]
      if of_life ~= life then
        more = math.max(0, tonumber(seen) - number_of(field_of(spending_key, 'base ' .. name)))
        add('base ' .. name, more, 0)
      end
      local before = is_known and known[i + 1]
      if not before then
        before = (is_known and of_life == life) and 0 or had
      end
      more = more + math.max(0, tonumber(in_all) - number_of(before))
      changed[2 * i - 1], changed[2 * i] = name, in_all
      told[2 * i], told[2 * i + 1] = name, string.format('%d', add('settled ' .. name, more, tonumber(seen)))
    end
    if changed[1] then
      redis.call('HSET', spent_key, unpack(changed))
    end
    return told
  end
  return spending
end
