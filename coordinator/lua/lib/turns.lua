-- Whose turn it is in a queue, and how long a new request most likely waits. For what is written, see lib/queue.lua.

-- include queue

local MOST_TENANTS, NEWEST, LONGEST_GAP_MS, FEWEST_GRANTS = 64, 0.05, 60000, 8
local PARKED = 1e15 -- behind all start tags
local MOST_PATIENCE_MS = 5000

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

-- The tenant whose turn it is in a line, and its tag; nil if nobody is there. `passed` tenants before it are left out.
local function next_turn(base, name, passed)
  local at = passed or 0
  local first = redis.pcall('ZRANGE', base .. 'turns:' .. name, at, at, 'WITHSCORES')
  return first[1], tonumber(first[2]) or 0
end

local function is_parked(tag)
  return tag >= PARKED
end

-- Sets a turn in one line behind all others, those that were parked before included.
local function park(base, name, holder, now)
  redis.pcall('ZADD', base .. 'turns:' .. name, 'XX', string.format('%d', PARKED + now), holder)
end

-- Moves a request out of its tenant's line into that of its API key's account, which has too many in flight.
local function park_seat(base, name, tenant, account, member, now)
  local line, turns = line_key(base, name, tenant), base .. 'turns:' .. name
  local since = redis.pcall('ZSCORE', line, member)
  if type(since) == 'string' then
    redis.pcall('ZREM', line, member)
    write('ZADD', line_key(base, name, account), since, member)
    write('ZADD', turns, 'NX', string.format('%d', PARKED + now), account)
    count_patient(base, 'parked ' .. tenant, 1)
    if size_of(line) == 0 then
      redis.pcall('ZREM', turns, tenant)
    end
  end
end

-- Moves the first request of an account's line back to its place in its tenant's line.
local function unpark_seat(base, name, account)
  local line, turns = line_key(base, name, account), base .. 'turns:' .. name
  local head = redis.pcall('ZRANGE', line, 0, 0, 'WITHSCORES')
  local gateway, id = string.match(head[1] or '', '^(%S+) (%S+)')
  local seat = gateway and seat_of(base, gateway, id)
  if seat then
    redis.pcall('ZREM', line, head[1])
    write('ZADD', line_key(base, name, seat.tenant), head[2], head[1])
    write('ZADD', turns, 'NX', start_tag(base, seat.band, seat.tenant), seat.tenant)
    count_patient(base, 'parked ' .. seat.tenant, -1)
  elseif head[1] then
    leave_line(base, name, account, head[1], nil) -- its gateway has gone
  end
  if size_of(line) == 0 then
    redis.pcall('ZREM', turns, account)
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
-- many seats are ahead. It can wait for `left_ms`. Seats of bands behind its own take no place away from it. If an
-- account has too many requests in flight (`is_blocked`), the pace of the queue tells nothing.
local function refusal_of(base, band, queue, tenant, left_ms, is_blocked)
  local lines, all, own = waiting_lines(base), 0, 0
  for _, line in ipairs(lines) do
    all = all + (line.band <= band and line.seats or 0)
    own = own + size_of(line_key(base, line.name, tenant))
  end
  own = own + sum_of(field_of(base .. 'patient', 'parked ' .. tenant))
  local ahead = seats_ahead(base, lines, band, queue, tenant)
  local mean, grants = string.match(field_of(base .. 'paces', queue) or '', '^%d+ (%S+) (%d+)$')
  mean = (is_blocked or sum_of(grants) < FEWEST_GRANTS) and 0 or sum_of(mean) -- fewer tell nothing
  local expected_ms = math.floor((ahead + 1) * mean)
  local refusal
  if own >= max_waiting_per_tenant then -- what the tenant can mend comes first
    refusal = 'full_tenant'
  elseif all >= max_waiting then
    refusal = 'full'
  elseif ahead > 0 and expected_ms > left_ms then
    refusal = 'unreachable'
  end
  return refusal, expected_ms, ahead
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
