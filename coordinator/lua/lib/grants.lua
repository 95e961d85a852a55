-- Grants: places requests that wait, as soon as there is room. A seat is a call of `place` that was kept, so a grant is
-- this call, run now. It reserves in the name of the gateway that took the seat, and puts its answer into a list that
-- this gateway reads:
--   grants:<gateway>    [seat, ms that it has waited, reply of place] as JSON

-- include queue
-- include place(SETTINGS, KEYS, ARGV)

local MOST_HEADS, MOST_LINES = 16, 64

-- Tries to place the first one of a line. Returns "granted", "gone" (it is not there any more), "waits" or "blocked" (its
-- tenant has too many requests in flight). With `takes_all_room`, its band's part of the room does not count.
local function try_seat(base, name, tenant, member, now, takes_all_room)
  local gateway, id = string.match(member, '^(%S+) (%S+)$')
  local seat = gateway and seat_of(base, gateway, id)
  local epoch = gateway and string.match(field_of(base .. 'gateways', gateway) or '', '^%d+')
  local is_over = not epoch or epoch == '0' or field_of(base .. 'flight:' .. gateway, id)
  if is_over or not seat or seat.tenant ~= tenant or string.format('%d %s', seat.band, seat.queue) ~= name then
    leave_line(base, name, tenant, member, seat)
    if gateway then
      redis.pcall('HDEL', base .. 'seats:' .. gateway, id)
    end
    return 'gone'
  end
  seat.settings.takes_all_room = takes_all_room
  local is_run, reply = pcall(place, seat.settings, seat.keys, seat.argv)
  if not is_run then
    reply = { 'lost' } -- its gateway places it again
  end
  if reply[1] == 'wait' or reply[1] == 'blocked' then
    return reply[1] == 'wait' and 'waits' or 'blocked'
  end
  if reply[1] == 'ok' then
    local tokens = reply[11] + (tonumber(seat.output_tokens) or 0)
    charge(base, gateway, id, seat.band, tenant, tonumber(seat.weight) or 1, tokens)
    note_pace(base, seat.queue, now)
    will_starve(base, seat.band, now + (tonumber(seat.starve_ms) or 0))
  end
  redis.pcall('HDEL', base .. 'seats:' .. gateway, id)
  leave_line(base, name, tenant, member, seat)
  local waited_ms = math.max(0, now - (tonumber(seat.since_ms) or now))
  write('RPUSH', base .. 'grants:' .. gateway, cjson.encode({ id, waited_ms, reply }))
  return 'granted'
end

-- Grants in one line as long as there is room: `most` seats. All requests of a line can use the same replicas, so if one
-- finds no room, none does. Parked tenants are tried only if `tries_parked`, and each once. Returns how many were
-- granted, and how many heads may still be tried.
local function grant_line(base, name, now, most, heads, tries_parked, takes_all_room)
  local granted = 0
  while heads > 0 and granted < most do
    local tenant, tag = next_turn(base, name)
    if not tenant then
      redis.pcall('HDEL', base .. 'waiting', name) -- somebody else wrote there
      redis.pcall('HDEL', base .. 'waiting_tokens', name)
      break
    end
    if is_parked(tag) and (not tries_parked or tag >= PARKED + now) then
      break
    end
    heads = heads - 1
    local member = redis.pcall('ZRANGE', line_key(base, name, tenant), 0, 0)[1]
    if not member then
      redis.pcall('ZREM', base .. 'turns:' .. name, tenant)
    else
      local outcome = try_seat(base, name, tenant, member, now, takes_all_room)
      if outcome == 'waits' then
        break
      elseif outcome == 'blocked' then
        park(base, name, tenant, now)
      end
      granted = granted + (outcome == 'granted' and 1 or 0)
    end
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

-- The lines whose requests can use one of these replicas; if these are not known, some of the lines, others each time.
local function concerned(base, lines, freed, now)
  local found = {}
  if freed == nil then
    for i = 1, math.min(#lines, MOST_LINES) do
      found[i] = lines[(now + i) % #lines + 1]
    end
    return found
  end
  for i = 1, #lines do
    local is_concerned = false
    for j = 1, #freed do
      is_concerned = is_concerned or may_serve(base, lines[i].queue, freed[j])
    end
    found[#found + 1] = is_concerned and lines[i] or nil
  end
  return found
end

-- Grants what can be granted, some heads at a time: the bands in order, but first one request of a band that starves.
-- `freed` are the replicas where room may have come; nil if that may be any. `most` is how many seats are granted at
-- most: a request that ends makes room for one, and to try a second one costs as much as a placement. Heartbeats grant
-- what is left.
local function grant_turns(base, now, freed, most)
  local lines, heads, granted = in_turn(base, concerned(base, waiting_lines(base), freed, now)), MOST_HEADS, 0
  most = most or MOST_HEADS
  for i = #lines, 1, -1 do
    if granted == 0 and is_starving(base, lines[i].band, now) then
      granted, heads = grant_line(base, lines[i].name, now, 1, heads, freed == nil, true)
    end
  end
  for i = 1, #lines do
    if heads > 0 and granted < most then
      local more
      more, heads = grant_line(base, lines[i].name, now, most - granted, heads, freed == nil)
      granted = granted + more
    end
  end
end
