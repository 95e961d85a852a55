-- Requests that wait for room. A queue holds those that the same replicas may serve: it is named "<digest>",
-- "<digest>/<pinned>" or "<digest>/<pinned>/<tried>": pinned to a replica, without those that failed (with commas).
-- Inside a queue, requests stand in lines, one for each band and tenant. Bands are numbers; 0 goes first.
--   waiting                         "<band> <queue>" -> how many seats it has
--   waiting_tokens                  the same -> prompt tokens that these have to compute, as estimated when they came
--   seats:<gateway>                 seat -> the call of `place` that waits, as JSON: {"band", "tenant", "weight",
--                                   "tokens", "output_tokens", "since_ms", "queue", "starve_ms", "key", "until_ms",
--                                   "settings", "keys", "argv"}. A seat has the name of the reservation that it will be.
--   turns:<band> <queue>            its tenants, by start tag: see lib/fair.lua; behind them those that are parked: they
--                                   have as many requests in flight as they may have
--   line:<band> <queue> <tenant>    "<gateway> <seat> <key> <until_ms>", by since when it waits (ms): until then it waits for a
--                                   replica that holds the key; "-": for any
--   paces                           queue -> "<ms of the last grant> <mean ms between grants> <grants>"
-- A tenant is text without spaces: gateways escape it.

-- include subsets
-- include fair

local MOST_TENANTS, NEWEST, LONGEST_GAP_MS, FEWEST_GRANTS, TENDED = 64, 0.05, 60000, 8, 8
local PARKED, SOON_MS = 1e15, 1000 -- behind all start tags
local MOST_PATIENCE_MS = 5000

-- The lines of all queues: a band (number) and a queue each, with their name and seats.
local function waiting_lines(base)
  local flat, lines = redis.pcall('HGETALL', base .. 'waiting'), {}
  for i = 1, #flat, 2 do
    local band, queue = string.match(flat[i], '^(%d+) (%S+)$')
    if band and sum_of(flat[i + 1]) > 0 then
      lines[#lines + 1] = { band = tonumber(band), queue = queue, name = flat[i], seats = sum_of(flat[i + 1]) }
    end
  end
  return lines
end

local function queue_of(digest, pinned, tried)
  local names = {}
  for replica in string.gmatch(tried, '%S+') do
    names[#names + 1] = replica
  end
  table.sort(names)
  local without = #names > 0 and '/' .. table.concat(names, ',') or ''
  return digest .. ((pinned ~= '' or without ~= '') and '/' .. pinned or '') .. without
end

-- Whether a replica may serve the requests of a queue.
local function may_serve(base, queue, replica)
  local digest, pinned, without = string.match(queue, '^([^/]+)/?([^/]*)/?(.*)$')
  if not digest or (pinned ~= '' and pinned ~= replica) then
    return false
  end
  if without ~= '' and string.find(',' .. without .. ',', ',' .. replica .. ',', 1, true) then
    return false
  end
  return pinned ~= '' or type(redis.pcall('ZSCORE', base .. 'subset:' .. digest, replica)) == 'string'
end

local function line_key(base, name, tenant)
  return base .. 'line:' .. name .. ' ' .. tenant
end

-- The tenant whose turn it is in a line, and its tag; nil if nobody is there. `passed` tenants before it are left out.
local function next_turn(base, name, passed)
  local at = passed or 0
  local first = redis.pcall('ZRANGE', base .. 'turns:' .. name, at, at, 'WITHSCORES')
  return first[1], tonumber(first[2]) or 0
end

local function is_parked(tag)
  return tag >= PARKED
end

-- Sets a tenant's turn in one line behind all others, those that were parked before included.
local function park(base, name, tenant, now)
  redis.pcall('ZADD', base .. 'turns:' .. name, 'XX', string.format('%d', PARKED + now), tenant)
end

-- The parked tenant of a line that was not tried for longest; nil if all were tried in this millisecond. One that was
-- parked before the clock went back counts, too.
local function parked_turn(base, name, now)
  local turns = base .. 'turns:' .. name
  local function first(from, to)
    return redis.pcall('ZRANGEBYSCORE', turns, from, to, 'LIMIT', 0, 1)[1]
  end
  return first(string.format('%d', PARKED), string.format('(%d', PARKED + now)) or
    first(string.format('(%d', PARKED + now + SOON_MS), '+inf')
end

local function unpark_in(base, name, tenant)
  local turns = base .. 'turns:' .. name
  local tag = redis.pcall('ZSCORE', turns, tenant)
  if type(tag) == 'string' and is_parked(tonumber(tag)) then
    redis.pcall('ZADD', turns, 'XX', start_tag(base, tonumber(string.match(name, '^%d+')), tenant), tenant)
  end
end

-- A parked tenant has one request less in flight.
local function unpark(base, tenant)
  for _, line in ipairs(waiting_lines(base)) do
    unpark_in(base, line.name, tenant)
  end
end

-- Whether somebody waits for this replica who goes before, or with, a request of this band and tenant. Whoever is parked
-- waits for nothing but its own requests.
local function somebody_waits(base, band, queue, replica, tenant)
  for _, line in ipairs(waiting_lines(base)) do
    if line.band <= band and (line.queue == queue or may_serve(base, line.queue, replica)) then
      local first, tag = next_turn(base, line.name)
      if (first and not is_parked(tag)) or size_of(line_key(base, line.name, tenant)) > 0 then
        return true
      end
    end
  end
  return false
end

-- How many seats are most likely granted before a new one of this tenant. In its own band, the tenants take turns.
local function seats_ahead(base, lines, band, queue, tenant)
  local name, ahead = band .. ' ' .. queue, 0
  for _, line in ipairs(lines) do
    if line.queue == queue and line.band < band then
      ahead = ahead + line.seats
    end
  end
  local own = size_of(line_key(base, name, tenant))
  local tenants = redis.pcall('ZRANGE', base .. 'turns:' .. name, 0, MOST_TENANTS - 1, 'WITHSCORES')
  for i = 1, #tenants, 2 do
    if tenants[i] ~= tenant and not is_parked(tonumber(tenants[i + 1])) then
      ahead = ahead + math.min(own + 1, size_of(line_key(base, name, tenants[i])))
    end
  end
  return ahead + own
end

-- Why a request gets no seat (nil if it gets one), how long it most likely waits, in ms (0 if nothing tells), and how
-- many seats are ahead. It can wait for `left_ms`. Seats of bands behind its own take no place away from it. If the tenant
-- has too many requests in flight (`is_blocked`), the pace of the queue tells nothing.
local function refusal_of(base, band, queue, tenant, left_ms, is_blocked)
  local lines, all, own = waiting_lines(base), 0, 0
  for _, line in ipairs(lines) do
    all = all + (line.band <= band and line.seats or 0)
    own = own + size_of(line_key(base, line.name, tenant))
  end
  local ahead = seats_ahead(base, lines, band, queue, tenant)
  local mean, grants = string.match(field_of(base .. 'paces', queue) or '', '^%d+ (%S+) (%d+)$')
  mean = (is_blocked or sum_of(grants) < FEWEST_GRANTS) and 0 or sum_of(mean) -- fewer tell nothing
  local expected_ms = math.floor((ahead + 1) * mean)
  local refusal
  if all >= max_waiting then
    refusal = 'full'
  elseif own >= max_waiting_per_tenant then
    refusal = 'full_tenant'
  elseif ahead > 0 and expected_ms > left_ms then
    refusal = 'unreachable'
  end
  return refusal, expected_ms, ahead
end

-- Counts seats of a line, and their tokens; returns how many it has.
local function count_seats(base, name, by, tokens)
  local seats = sum_of(field_of(base .. 'waiting', name)) + by
  write('HSET', base .. 'waiting', name, string.format('%d', seats))
  local sum = math.max(0, sum_of(field_of(base .. 'waiting_tokens', name)) + by * tokens)
  write('HSET', base .. 'waiting_tokens', name, string.format('%d', sum))
  return seats
end

-- The name of a seat in its line.
local function member_of(gateway, id, seat)
  return string.format('%s %s %s %d', gateway, id, seat.key, seat.until_ms)
end

local function tokens_of(seat)
  return seat and sum_of(seat.tokens) or 0
end

-- The score with which a seat stands in its line: since when it waits. If the clock went back, a new one stands behind
-- those that came before, which have later times.
local function place_in_line(line, since_ms, now)
  local last = since_ms == now and redis.pcall('ZRANGE', line, -1, -1, 'WITHSCORES') or {}
  local last_ms = tonumber(last[2]) or 0
  return string.format('%.0f', last_ms > now and last_ms + 1 or since_ms)
end

-- Puts a seat at the end of its line, or where it stood before.
local function stand_in_line(base, gateway, id, seat, now)
  local name = string.format('%d %s', seat.band, seat.queue)
  local line = line_key(base, name, seat.tenant)
  local added = write('ZADD', line, place_in_line(line, seat.since_ms, now), member_of(gateway, id, seat))
  write('ZADD', base .. 'turns:' .. name, start_tag(base, seat.band, seat.tenant), seat.tenant)
  if count_seats(base, name, added, tokens_of(seat)) ~= 1 then
    return
  end
  local is_first = true
  for _, line in ipairs(waiting_lines(base)) do
    is_first = is_first and (line.band ~= seat.band or line.name == name)
  end
  if is_first then
    will_starve(base, seat.band, now + seat.starve_ms)
  end
  if not field_of(base .. 'paces', seat.queue) then
    write('HSET', base .. 'paces', seat.queue, string.format('%d 0 0', now))
  end
end

local function take_seat(base, gateway, id, seat, now)
  write('HSET', base .. 'seats:' .. gateway, id, cjson.encode(seat))
  stand_in_line(base, gateway, id, seat, now)
end

-- Takes the name of a seat off its line. The last one to leave ends the line, the queue, and the accounts of a busy time.
-- `seat` is nil if it cannot be read.
local function leave_line(base, name, tenant, member, seat)
  local line, turns = line_key(base, name, tenant), base .. 'turns:' .. name
  local left = redis.pcall('ZREM', line, member) == 1 and count_seats(base, name, -1, tokens_of(seat)) or 1
  if size_of(line) == 0 then
    redis.pcall('ZREM', turns, tenant)
  end
  if size_of(turns) == 0 then
    redis.pcall('HDEL', base .. 'waiting', name)
    redis.pcall('HDEL', base .. 'waiting_tokens', name)
    redis.pcall('HDEL', base .. 'paces', string.match(name, ' (%S+)$') or '')
  elseif left <= 0 then -- somebody else wrote there
    write('HSET', base .. 'waiting', name, 1)
  end
  if redis.call('EXISTS', base .. 'waiting') == 0 then
    forget_tags(base)
  end
end

-- The seat as it was kept; nil if there is none, or it cannot be read.
local function seat_of(base, gateway, id)
  local text = field_of(base .. 'seats:' .. gateway, id)
  local is_json, seat = pcall(cjson.decode, text or '')
  if is_json and type(seat) == 'table' and type(seat.argv) == 'table' and type(seat.keys) == 'table' and
    type(seat.settings) == 'table' and type(seat.queue) == 'string' and type(seat.tenant) == 'string' and
    type(seat.band) == 'number' and type(seat.since_ms) == 'number' and type(seat.starve_ms) == 'number' and
    type(seat.key) == 'string' and type(seat.until_ms) == 'number' then
    return seat
  end
end

-- Removes a seat, granted or not. Returns whether it was there.
local function remove_seat(base, gateway, id)
  local seat = seat_of(base, gateway, id)
  if seat then
    leave_line(base, string.format('%d %s', seat.band, seat.queue), seat.tenant, member_of(gateway, id, seat), seat)
  end
  return redis.pcall('HDEL', base .. 'seats:' .. gateway, id) == 1
end

-- Until when a seat waits for a replica that holds its prompt. A time that is too far ahead was written before the clock
-- went back: it is over.
local function patient_until(until_ms, now)
  return until_ms <= now + MOST_PATIENCE_MS and until_ms or 0
end

-- Notes that room of a queue was given to a request, while others wait there.
local function note_pace(base, queue, now)
  local last, mean, grants = string.match(field_of(base .. 'paces', queue) or '', '^(%d+) (%S+) (%d+)$')
  if not last then
    return
  end
  mean, grants = sum_of(mean), sum_of(grants) + 1
  -- A single long gap, as when the clock was set, tells little.
  local longest_ms = grants > FEWEST_GRANTS and 1000 + 10 * mean or LONGEST_GAP_MS
  local gap = math.min(longest_ms, LONGEST_GAP_MS, math.max(0, now - tonumber(last)))
  mean = mean + math.max(NEWEST, 1 / grants) * (gap - mean)
  write('HSET', base .. 'paces', queue, string.format('%d %.3f %d', now, mean, grants))
end

-- Looks at some of a gateway's seats, and puts those back into line that somebody else took out of it.
local function tend_seats(base, gateway, now)
  local ids = redis.pcall('HRANDFIELD', base .. 'seats:' .. gateway, TENDED)
  for i = 1, #ids do
    local seat = seat_of(base, gateway, ids[i])
    if not seat then
      redis.call('HDEL', base .. 'seats:' .. gateway, ids[i])
    else
      local name = string.format('%d %s', seat.band, seat.queue)
      local line = line_key(base, name, seat.tenant)
      local is_standing = type(redis.pcall('ZSCORE', line, member_of(gateway, ids[i], seat))) == 'string'
      if not is_standing or sum_of(field_of(base .. 'waiting', name)) == 0 or
        type(redis.pcall('ZSCORE', base .. 'turns:' .. name, seat.tenant)) ~= 'string' then
        stand_in_line(base, gateway, ids[i], seat, now)
        if sum_of(field_of(base .. 'waiting', name)) == 0 then
          count_seats(base, name, 1, tokens_of(seat))
        end
      end
    end
  end
end
