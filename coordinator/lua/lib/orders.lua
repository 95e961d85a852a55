-- The orders of a large subset, as a placement uses them. All of this is made only for such a subset: functions that a
-- small fleet never calls would cost it a tenth of a placement.

local function orders_of(subset, base)
  local READMITS_ONE_IN, READMITTED_AT_ONCE, NOMINATIONS, NOMINATED_AGAIN, ADDED_OWNERS = 8, 8, 3, 64, 8
  local MANY_OWNERS, PICKED_OWNERS, SEARCHED = 32, 3, 16

  local orders, is_tried = { count = 0 }, subset.is_tried
  local spare, is_named, named_first, good_named, is_desperate = select(2, string.gsub(tried, '%S+', '')), {}, {}, {}, false
  local all_active

  -- The first `count` members of an order and their scores: the lowest ones, or the highest ones in reverse. Redis lists
  -- equal scores by name. So if all of these are equal, they are taken from a random place among their equals on.
  function orders.first(order, count, is_reverse)
    local key, range, wanted = subset.key .. order, is_reverse and 'ZREVRANGE' or 'ZRANGE', count + spare
    local found = redis.pcall(range, key, 0, wanted - 1, 'WITHSCORES')
    local names, scores = {}, {}
    for i = 1, #found, 2 do
      names[#names + 1], scores[#scores + 1] = found[i], found[i + 1]
    end
    if #names == wanted and scores[1] == scores[wanted] then
      local equals = redis.call('ZCOUNT', key, scores[1], scores[1])
      local from = math.random(0, equals - 1)
      local others = from > 0 and redis.call(range, key, from, math.min(from + wanted, equals) - 1) or names
      for i = 1, #names - #others do
        others[#others + 1] = names[i]
      end
      names = others
    end
    return names, scores
  end

  -- Random good members, no one twice.
  function orders.random(count)
    return redis.pcall('ZRANDMEMBER', subset.key .. ':good', count + spare)
  end

  -- Good members in order of names, from the one at `rank` on (0: the first).
  function orders.good_from(rank, count)
    local key, wanted = subset.key .. ':good', count + spare
    local names = redis.pcall('ZRANGE', key, rank, rank + wanted - 1)
    local others = #names < wanted and rank > 0 and redis.pcall('ZRANGE', key, 0, wanted - #names - 1) or {}
    for i = 1, #others do
      names[#names + 1] = others[i]
    end
    return names
  end

  -- For how many tokens each has room in its cache; -1 for one that was tried or is in no order.
  function orders.rooms(names)
    local rooms = #names > 0 and redis.pcall('ZMSCORE', subset.key .. ':free', unpack(names)) or {}
    local found = {}
    for i = 1, #names do
      found[i] = rooms[i] and not is_tried[names[i]] and tonumber(rooms[i]) or -1
    end
    return found
  end

  -- Members that follow the first ones in the order of load and have room for so many tokens. None if one of the first,
  -- whose `rooms` these are, has it.
  function orders.with_room(rooms, needed, count)
    local found = {}
    for i = 1, #rooms do
      if rooms[i] >= needed then
        return found
      end
    end
    local following = #rooms > 0 and redis.call('ZRANGE', subset.key .. ':load', #rooms, #rooms + SEARCHED - 1) or {}
    rooms = orders.rooms(following)
    for i = 1, #following do
      if #found < count and rooms[i] >= needed then
        found[#found + 1] = following[i]
      end
    end
    return found
  end

  -- The names of several lists, each once, without those that were tried.
  local function each_once(lists)
    local names, count = {}, 0
    is_named = {}
    for i = 1, #lists do
      local list = lists[i]
      for j = 1, #list do
        local replica = list[j]
        if not is_named[replica] and not is_tried[replica] then
          count = count + 1
          names[count], is_named[replica] = replica, true
        end
      end
    end
    return names
  end

  -- Readmits replicas whose breaker has been open for long enough. `reorder` does so, too, if a gateway runs it.
  local function readmit()
    local due = redis.pcall('ZRANGEBYSCORE', subset.key .. ':out', '-inf', now, 'LIMIT', 0, READMITTED_AT_ONCE)
    for i = 1, explain and 0 or #due do
      stand(base, due[i], now, longest_open_ms)
    end
  end

  -- The candidates: good, broken and dead ones.
  function orders.candidates(nominate, new_tokens)
    if seed % READMITS_ONE_IN == 0 then
      readmit()
    end
    for attempt = 1, NOMINATIONS do
      orders.count = size_of(subset.key .. ':good')
      local lists = nominate(orders, new_tokens)
      lists[#lists + 1] = attempt > 1 and orders.random(NOMINATED_AGAIN) or nil
      local good, broken, dead = classify(each_once(lists))
      if #good > 0 then
        named_first, good_named = lists[1], good
        return good, broken, dead
      elseif explain or (#broken + #dead == 0 and attempt > 1) then
        break
      end
      readmit()
    end
    is_desperate = true
    local good, broken, dead = classify(each_once({ (orders.first(':out', LOOK_AT_ALL)) }))
    if #good + #broken + #dead == 0 then -- the orders are lost
      return classify(each_once({ redis.pcall('ZRANDMEMBER', subset.key, NOMINATED_AGAIN) }))
    end
    return good, broken, dead
  end

  -- Those of the good replicas that have room by their scores, among those with the fewest requests in flight and those
  -- with the least load: if none of these has room, most likely none has. `share`: as in has_room.
  function orders.more_with_room(share)
    local by_requests, requests = orders.first(':in_flight', LOOK_AT_ALL)
    if not requests[1] or not has_room('', math.floor(tonumber(requests[1])), 0, share) then
      return {} -- nobody has fewer
    end
    local names = each_once({ by_requests, (orders.first(':load', LOOK_AT_ALL)) })
    local scores, active, backlog = redis.pcall('ZMSCORE', subset.key .. ':in_flight', unpack(names)), {}, {}
    for i = 1, #names do
      local score = tonumber(scores[i] or math.huge)
      active[i] = math.floor(score)
      backlog[i] = (score - active[i]) * 1e9
    end
    return (classify(with_room({ count = #names, name = names, active = active, backlog = backlog }, share)))
  end

  -- Requests in flight on a good replica, in the mean.
  function orders.mean_active()
    all_active = all_active or sum_of(field_of(base .. 'subset_active', subset.digest))
    return all_active / math.max(1, orders.count)
  end

  -- Those of the good replicas in `names` that the load guard allows, without those that were tried.
  local function allowed(names)
    local in_flight = #names > 0 and redis.pcall('ZMSCORE', subset.key .. ':in_flight', unpack(names)) or {}
    local limit, speed_of, found = most_active(orders.mean_active()), speeds and speeds.of(names), {}
    for i = 1, #names do
      local active = in_flight[i] and math.floor(tonumber(in_flight[i]))
      if active and (speeds and speeds.guarded(active, speed_of[i]) or active) < limit and not is_tried[names[i]] then
        found[#found + 1] = names[i]
      end
    end
    return found
  end

  -- The least loaded of these replicas, not more than `count` of them.
  local function least_loaded(names, count)
    local loads = #names > 0 and redis.pcall('ZMSCORE', subset.key .. ':load', unpack(names)) or {}
    local picked, load_of = {}, {}
    for i = 1, #names do
      local name, load = names[i], loads[i] and tonumber(loads[i])
      if load and not is_tried[name] then
        local at = #picked + 1
        while at > 1 and load < load_of[picked[at - 1]] do
          at = at - 1
        end
        load_of[name] = load
        if at <= count then
          table.insert(picked, at, name)
          picked[count + 1] = nil
        end
      end
    end
    return picked
  end

  -- The least loaded of a key's many owners that the load guard allows. Owners that are not good are in no order, so they
  -- are left out. If there are more than a few dozen, a sample of them is taken.
  -- There is no need if one of the candidates named first, which are the least loaded of all, is among the owners in
  -- `fields` (as HGETALL gives them), or is known to own a deeper key, and the load guard allows it.
  function orders.more_owners(key, count, fields, depth)
    if is_desperate then
      return {}
    end
    local is_owner, is_first, first = {}, {}, {}
    for i = 1, #fields, 2 do
      is_owner[fields[i]] = true
    end
    for i = 1, #named_first do
      is_first[named_first[i]] = true
    end
    for i = 1, #good_named do
      local replica = good_named[i]
      if is_first[replica] and (depth[replica] or is_owner[replica]) then
        first[#first + 1] = replica
      end
    end
    if #allowed(first) > 0 then
      return {}
    end
    local owners = count > MANY_OWNERS and redis.call('HRANDFIELD', key, MANY_OWNERS) or redis.call('HKEYS', key)
    local below = allowed(owners)
    return least_loaded(#below > 0 and below or owners, PICKED_OWNERS)
  end

  -- Those of the owners (replica -> anything) that are in the subset, good, not tried and not named yet: at most so many
  -- of them, in the order of `is_before` if they are more.
  local function good_among(owners, most, is_before)
    local names, members = {}, {}
    for replica in pairs(owners) do
      if not is_named[replica] and not is_tried[replica] then
        names[#names + 1] = replica
      end
    end
    if #names > most then
      table.sort(names, is_before)
    end
    local are_good = #names > 0 and redis.pcall('ZMSCORE', subset.key .. ':good', unpack(names)) or {}
    for i = 1, #names do
      if are_good[i] and #members < most then
        members[#members + 1] = names[i]
      end
    end
    return (classify(members))
  end

  -- The good ones of a few owners, before any candidate is named.
  function orders.good_owners(owners)
    orders.count = size_of(subset.key .. ':good')
    return good_among(owners, math.huge)
  end

  -- Adds owners of the chain to the candidates, those with the deepest part of it first.
  function orders.add_owners(names, depth)
    local good = is_desperate and {} or
      good_among(depth, ADDED_OWNERS, function(a, b) return depth[a] > depth[b] end)
    for i = 1, #good do
      names[#names + 1] = good[i]
    end
  end

  return orders
end
