-- Requests that are queued for room. coordinator/README.md tells what each key holds, and how queues are named. Inside a
-- queue, requests stand in lines, one for each band and tenant; those whose API key has as many in flight as it may have
-- stand in a line of its account, so they hold up nobody in the line of their tenant. A seat has the name of the
-- reservation that it will be. "layout" among its settings tells calls of another version apart.

-- include subsets
-- include fair

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

-- The line of a tenant, or that of an account which is parked.
local function line_key(base, name, holder)
  return base .. 'line:' .. name .. ' ' .. holder
end

local function is_account(holder)
  return string.find(holder, ':', 1, true) ~= nil
end

-- Counts seats of a line, and their tokens; returns how many it has. What cannot be added to counts as 0.
local function count_seats(base, name, by, tokens)
  local function count(hash, more)
    local sum = redis.pcall('HINCRBY', base .. hash, name, string.format('%d', more))
    if type(sum) ~= 'number' or sum < 0 or sum >= 1e15 then
      sum = math.max(0, more)
      write('HSET', base .. hash, name, string.format('%d', sum))
    end
    return sum
  end
  count('waiting_tokens', by * tokens)
  return count('waiting', by)
end

-- The name of a seat in its line.
local function member_of(gateway, id, seat)
  local key = seat.account and seat.key .. '/' .. seat.account or seat.key
  return string.format('%s %s %s %d', gateway, id, key, seat.until_ms)
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

-- Counts requests that are queued for a replica that holds a key; "-": for any.
local function count_patient(base, key, by)
  if key ~= '-' and by ~= 0 then
    local sum = redis.pcall('HINCRBY', base .. 'patient', key, by)
    if type(sum) == 'number' and sum <= 0 then
      redis.pcall('HDEL', base .. 'patient', key)
    end
  end
end

-- Puts a seat at the end of its line, or where it stood before.
local function stand_in_line(base, gateway, id, seat, now)
  local name = string.format('%d %s', seat.band, seat.queue)
  local line = line_key(base, name, seat.tenant)
  local added = write('ZADD', line, place_in_line(line, seat.since_ms, now), member_of(gateway, id, seat))
  write('ZADD', base .. 'turns:' .. name, start_tag(base, seat.band, seat.tenant), seat.tenant)
  count_patient(base, seat.key, added)
  if count_seats(base, name, added, tokens_of(seat)) ~= 1 then
    return
  end
  local is_first = true
  for _, line in ipairs(waiting_lines(base)) do
    is_first = is_first and (line.band ~= seat.band or line.name == name)
  end
  if is_first then
    write('HSET', base .. 'fair', starving_at(seat.band, now + seat.starve_ms))
  end
  if not field_of(base .. 'paces', seat.queue) then
    write('HSET', base .. 'paces', seat.queue, string.format('%d 0 0', now))
  end
end

local function take_seat(base, gateway, id, seat, now)
  write('HSET', base .. 'seats:' .. gateway, id, cjson.encode(seat))
  stand_in_line(base, gateway, id, seat, now)
end

-- Whose line a seat stands in: its account's if that is parked, else its tenant's.
local function holder_of(base, name, member, seat)
  local stands = seat.account and redis.pcall('ZSCORE', line_key(base, name, seat.account), member)
  return type(stands) == 'string' and seat.account or seat.tenant
end

-- Takes the name of a seat off the line of its `holder`. The last one to leave ends the line, the queue, and the charges of
-- a busy time. `seat` is nil if it cannot be read.
local function leave_line(base, name, holder, member, seat)
  local line, turns = line_key(base, name, holder), base .. 'turns:' .. name
  local left = 1
  if redis.pcall('ZREM', line, member) == 1 then
    left = count_seats(base, name, -1, tokens_of(seat))
    count_patient(base, string.match(member, ' ([^%s/]+)%S* %d+$') or '-', -1)
    if seat and is_account(holder) then
      count_patient(base, 'parked ' .. seat.tenant, -1)
    end
  end
  local is_last = size_of(line) == 0
  if is_last then
    redis.pcall('ZREM', turns, holder)
  end
  if is_last and size_of(turns) == 0 then
    redis.pcall('HDEL', base .. 'waiting', name)
    redis.pcall('HDEL', base .. 'waiting_tokens', name)
    redis.pcall('HDEL', base .. 'paces', string.match(name, ' (%S+)$') or '')
    if redis.call('EXISTS', base .. 'waiting') == 0 then
      forget_tags(base)
    end
  elseif left <= 0 then -- somebody else wrote there
    write('HSET', base .. 'waiting', name, 1)
  end
end

-- The seat as it was kept; nil if there is none, or it cannot be read.
local function seat_of(base, gateway, id)
  local text = field_of(base .. 'seats:' .. gateway, id)
  local is_json, seat = pcall(cjson.decode, text or '')
  if is_json and type(seat) == 'table' and type(seat.argv) == 'table' and type(seat.keys) == 'table' and
    type(seat.settings) == 'table' and type(seat.queue) == 'string' and type(seat.tenant) == 'string' and
    type(seat.band) == 'number' and type(seat.since_ms) == 'number' and type(seat.starve_ms) == 'number' and
    type(seat.key) == 'string' and type(seat.until_ms) == 'number' and
    (seat.account == nil or type(seat.account) == 'string') then
    return seat
  end
end

-- Removes a seat, granted or not. Returns whether it was there.
local function remove_seat(base, gateway, id)
  local seat = seat_of(base, gateway, id)
  if seat then
    local name, member = string.format('%d %s', seat.band, seat.queue), member_of(gateway, id, seat)
    leave_line(base, name, holder_of(base, name, member, seat), member, seat)
  end
  return redis.pcall('HDEL', base .. 'seats:' .. gateway, id) == 1
end

