-- Grants: places queued requests, as soon as there is room. A seat is a call of `place` that was kept, so a grant is
-- this call, run now. It reserves in the name of the gateway that took the seat, and puts its answer into a list that
-- this gateway reads:
--   grants:<gateway>    [seat, ms that it has waited, reply of place] as JSON

-- include turns
-- include place(SETTINGS, KEYS, ARGV)
-- include pair

local MOST_HEADS, MOST_LINES, LOOKED_AT, SOON_MS = 16, 64, 64, 1000

-- The parked tenant or account of a line that was not tried for longest; nil if all were tried in this millisecond. One
-- that was parked before the clock went back counts, too.
local function parked_turn(base, name, now)
  local turns = base .. 'turns:' .. name
  local function first(from, to)
    return redis.pcall('ZRANGEBYSCORE', turns, from, to, 'LIMIT', 0, 1)[1]
  end
  return first(string.format('%d', PARKED), string.format('(%d', PARKED + now)) or
    first(string.format('(%d', PARKED + now + SOON_MS), '+inf')
end

local function unpark_in(base, name, holder)
  if is_account(holder) then
    return unpark_seat(base, name, holder)
  end
  local turns = base .. 'turns:' .. name
  local tag = redis.pcall('ZSCORE', turns, holder)
  if type(tag) == 'string' and is_parked(tonumber(tag)) then
    redis.pcall('ZADD', turns, 'XX', start_tag(base, tonumber(string.match(name, '^%d+')), holder), holder)
  end
end

-- These accounts have one request less in flight.
local function unpark(base, accounts)
  for _, line in ipairs(waiting_lines(base)) do
    for _, account in ipairs(accounts) do
      unpark_in(base, line.name, account.name)
    end
  end
end

local at_limit = {}

-- An account has too many requests in flight for the first request of a `holder`.
local function hold_back(base, name, holder, member, account, now)
  if account ~= holder and is_account(account) then
    at_limit[account] = true
    return park_seat(base, name, holder, account, member, now)
  elseif account ~= holder then -- its key would let it in: the end of a request of its tenant lets it go
    unpark_seat(base, name, holder)
    park(base, name, account, now)
  end
  park(base, name, holder, now)
end

-- The settings with which a granted request gets its second place: room may have come at the first one only.
local function as_second(settings)
  local second = {}
  for name, value in pairs(settings) do
    second[name] = value
  end
  second.room_on, second.takes_all_room, second.prefers_until_ms = nil, false, 0
  return second
end

-- Tries to place a request of a line. Returns "granted", "gone" (it is not there any more), "waits", "prefers" (a replica
-- that has no room holds more of its prompt) or "blocked", and the account that has too many requests in flight. If it is
-- granted, also whether its replica has room for another one. With `takes_all_room`, its band's part of the room does not count,
-- and it prefers none. `freed`: as in grant_turns.
local function try_seat(base, name, holder, member, now, freed, takes_all_room, was_parked)
  local gateway, id = string.match(member, '^(%S+) (%S+) %S+ %d+$')
  local seat = gateway and seat_of(base, gateway, id)
  local epoch = gateway and string.match(field_of(base .. 'gateways', gateway) or '', '^%d+')
  local is_over = not epoch or epoch == '0' or field_of(base .. 'flight:' .. gateway, id)
  local is_its = seat and (seat.tenant == holder or seat.account == holder)
  if is_over or not is_its or string.format('%d %s', seat.band, seat.queue) ~= name then
    leave_line(base, name, holder, member, seat)
    if gateway then
      redis.pcall('HDEL', base .. 'seats:' .. gateway, id)
    end
    return 'gone'
  end
  seat.settings.takes_all_room, seat.settings.room_on, seat.settings.now = takes_all_room, freed, now
  seat.settings.seen_uncached = tokens_of(seat)
  seat.settings.prefers_until_ms = takes_all_room and 0 or patient_until(seat.until_ms, now)
  local is_run, reply = pcall(function()
    return paired(function(keys, argv, is_second)
      return place(is_second and as_second(seat.settings) or seat.settings, keys, argv)
    end, seat.keys, seat.argv)
  end)
  if not is_run then
    reply = { 'lost' } -- its gateway places it again
  end
  if reply[1] == 'wait' or reply[1] == 'blocked' or reply[1] == 'prefers' then
    return reply[1] == 'wait' and 'waits' or reply[1], reply[2]
  end
  if reply[1] == 'ok' then
    local tokens = reply[11] + (tonumber(seat.output_tokens) or 0)
    local weight, starves_ms = tonumber(seat.weight) or 1, now + (tonumber(seat.starve_ms) or 0)
    charge(base, gateway, id, seat.band, seat.tenant, weight, tokens, now, starving_at(seat.band, starves_ms))
    if not was_parked then -- it waited for its own requests
      note_pace(base, seat.queue, now)
    end
  end
  redis.pcall('HDEL', base .. 'seats:' .. gateway, id)
  leave_line(base, name, holder, member, seat)
  local waited_ms = math.max(0, now - (tonumber(seat.since_ms) or now))
  write('RPUSH', base .. 'grants:' .. gateway, cjson.encode({ id, waited_ms, reply }))
  return 'granted', seat.settings.has_more
end

-- The first request of a line that one of the replicas in `freed` fits: the replica holds the key that the request waits
-- for, nobody holds it any more, or the request has waited long enough for those that do. nil if none of the first
-- LOOKED_AT does. If it is not known where room came, it is the first one that waits for no key: those that do must not
-- hide it. Requests of an account that was just found to have too many in flight are parked. `is_empty` if nobody is there.
local function fitting(base, name, holder, freed, now)
  local line, head, holds, passed = line_key(base, name, holder), nil, {}, 0
  for many = 1, LOOKED_AT, LOOKED_AT - 1 do -- most often the first one fits, so it is looked at alone
    local members = redis.pcall('ZRANGE', line, passed, passed + many - 1)
    for i = 1, #members do
      local key, account, until_ms = string.match(members[i], ' ([^%s/]+)/?(%S*) (%d+)$')
      if account and account ~= holder and at_limit[account] then
        park_seat(base, name, holder, account, members[i], now)
      else
        head, passed = head or members[i], passed + 1
        if not key or key == '-' or patient_until(tonumber(until_ms), now) <= now then
          return members[i]
        end
        if freed and holds[key] == nil then -- many may wait for one key
          holds[key] = redis.call('EXISTS', base .. 'own:' .. key) == 0
          for j = 1, holds[key] and 0 or #freed do
            holds[key] = holds[key] or redis.pcall('HEXISTS', base .. 'own:' .. key, freed[j]) == 1
          end
        end
        if holds[key] then
          return members[i]
        end
      end
    end
  end
  return not freed and head or nil, head == nil and size_of(line) == 0
end

-- Grants in one line as long as there is room: `most` seats, not counting those that leave room for another one. All
-- requests of a line can use the same replicas, so if one finds no room, none does. A tenant whose requests wait for other
-- replicas is passed, and keeps its turn; parked ones are left out. With `takes_all_room`, all are counted. Returns how many
-- were counted, how many heads may still be tried, and whether there is no room.
local function grant_line(base, name, now, most, heads, freed, takes_all_room)
  local granted, passed, is_full = 0, 0, false
  while heads > 0 and granted < most do
    local tenant, tag = next_turn(base, name, passed)
    if not tenant then
      if passed == 0 then -- somebody else wrote there
        redis.pcall('HDEL', base .. 'waiting', name)
        redis.pcall('HDEL', base .. 'waiting_tokens', name)
      end
      break
    end
    if is_parked(tag) then
      break
    end
    heads = heads - 1
    local member, is_empty = fitting(base, name, tenant, freed, now)
    if is_empty then
      redis.pcall('ZREM', base .. 'turns:' .. name, tenant)
    else
      local outcome, has_more = 'prefers', false
      if member then
        outcome, has_more = try_seat(base, name, tenant, member, now, freed, takes_all_room)
      end
      if outcome == 'waits' then
        is_full = true
        break
      elseif outcome == 'blocked' then
        hold_back(base, name, tenant, member, has_more, now)
      end
      passed = passed + (outcome == 'prefers' and 1 or 0)
      granted = granted + (outcome == 'granted' and (takes_all_room or not has_more) and 1 or 0)
    end
  end
  return granted, heads, is_full
end

-- Tries what is parked in a line, each once: a request of theirs may have ended in another pool. The arguments and
-- the first two results are as above.
local function grant_parked(base, name, now, most, heads)
  local granted = 0
  while heads > 0 and granted < most do
    local tenant = parked_turn(base, name, now)
    if not tenant then
      break
    end
    heads = heads - 1
    local member, is_empty = fitting(base, name, tenant, nil, now)
    local outcome, account
    if member then
      outcome, account = try_seat(base, name, tenant, member, now, nil, false, true)
    end
    if is_empty then
      redis.pcall('ZREM', base .. 'turns:' .. name, tenant)
    elseif outcome == 'blocked' then
      hold_back(base, name, tenant, member, account, now)
    elseif outcome == 'prefers' or outcome == 'waits' then
      unpark_in(base, name, tenant)
      break
    end
    granted = granted + (outcome == 'granted' and 1 or 0)
  end
  return granted, heads
end

-- Orders the lines of all queues: by their bands, then by the start tags and the waits of those whose turn it is.
local function in_turn(base, lines)
  for i = 1, #lines > 1 and #lines or 0 do
    local line = lines[i]
    local first, tag = next_turn(base, line.name)
    local head = first and redis.pcall('ZRANGE', line_key(base, line.name, first), 0, 0, 'WITHSCORES') or {}
    line.tag, line.since_ms = tag, tonumber(head[2]) or 0
  end
  table.sort(lines, function(a, b)
    if a.band ~= b.band then
      return a.band < b.band
    end
    return a.tag < b.tag or (a.tag == b.tag and a.since_ms < b.since_ms)
  end)
  return lines
end

-- The lines whose requests can use some of these replicas, and which of them (`freed`); if these are not known, some of the
-- lines, others each time.
local function concerned(base, lines, freed, now)
  local found = {}
  if freed == nil then
    for i = 1, math.min(#lines, MOST_LINES) do
      found[i] = lines[(now + i) % #lines + 1]
    end
    return found
  end
  for i = 1, #lines do
    local usable = {}
    for j = 1, #freed do
      usable[#usable + 1] = may_serve(base, lines[i].queue, freed[j]) and freed[j] or nil
    end
    lines[i].freed = usable
    found[#found + 1] = #usable > 0 and lines[i] or nil
  end
  return found
end

-- Grants what can be granted, some heads at a time: the bands in order, but first one request of a band that starves.
-- `freed` are the replicas where room may have come; nil if that may be any. `most` is how many seats are granted at
-- most, not counting those that leave room for another one: a request that ends most often makes room for one, and to try
-- a second one costs as much as a placement. What is parked comes last, and only if it is not known where room came. In a
-- full line, one of these is tried: if its accounts let it in, it gets its turn back, and the next room is not given to
-- others each time.
local function grant_turns(base, now, freed, most)
  local lines, heads, granted = in_turn(base, concerned(base, waiting_lines(base), freed, now)), MOST_HEADS, 0
  most = most or MOST_HEADS
  for i = #lines, 1, -1 do
    if granted == 0 and is_starving(base, lines[i].band, now) then
      granted, heads = grant_line(base, lines[i].name, now, 1, heads, nil, true)
    end
  end
  for i = 1, #lines do
    if heads > 0 and granted < most then
      local more
      more, heads, lines[i].is_full = grant_line(base, lines[i].name, now, most - granted, heads, lines[i].freed)
      granted = granted + more
    end
  end
  for i = 1, freed and 0 or #lines do
    if heads > 0 and granted < most then
      local tries = lines[i].is_full and 1 or heads
      local more, left = grant_parked(base, lines[i].name, now, most - granted, tries)
      granted, heads = granted + more, heads - tries + left
    end
  end
end
