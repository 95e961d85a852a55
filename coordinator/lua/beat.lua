-- A gateway's heartbeat. It renews the gateway's lease, tells what has changed in the pool since the version that the
-- gateway knows, and names the gateways to reap. Time in which the store itself did not serve never counts against a
-- lease: if the last tick of any gateway is more than max_gap_ms ago, every gateway's lease is first extended by the
-- gap. If the last tick lies more than max_gap_ms in the future, the clock went back, and every expiry moves back by
-- the same time. No lease ever lasts longer than if it were renewed now.
--
-- Most heartbeats look at a few records. One looks at all of them if the last look is not fresh any more (see
-- lib/view.lua) or the clock jumped: only such a heartbeat finds gateways to reap, and expiries to correct.
--
-- KEYS
--   hash    gateways, leases, replicas, breakers, agents, reaped, view, waiting, seats:<gateway>, holds, rates, speeds
--   hash    late
--   list    grants:<gateway>, heard:<gateway>
--   zset    view_changes
-- ARGV
--   text    gateway, epoch
--   number  lease_ms, max_gap_ms
--   flag    leaving: the gateway gives its leases up; it has stated that it has no reservations and seats
--   flag    does_maintenance: false for a gateway that serves none of the pool's replicas
--   text    version: what the last answer said; "" asks for everything
--   text    held: how many requests this gateway holds until a replica is ready, and their prompts' tokens; "": none
--   flag    has_written: the gateway changed replicas' records since its last heartbeat, and must see them now
-- Returns {status, expired gateways, worker, now_ms, when the clock last jumped, number of reservations in reaped,
-- version, 1 if all replicas are told, else 0 (those that changed), replicas (flat pairs of a name and its line in
-- `view`; "" if it is gone), number of gateways, 1 if requests wait, else 0}. `status` is "ok", or "stale" if this gateway's lease or epoch is not
-- known: then it must reassert. `worker` is the gateway that holds the lease on the pool's maintenance (health checks, trimming).

local HOUR_MS, UNEQUAL = 3600000, 1.5

-- include time
-- include view
-- include tables
-- include late

check_hashes(breakers_key, agents_key)
local records = redis.call('HLEN', replicas_key) + redis.call('HLEN', gateways_key)
local reaped = redis.call('HLEN', reaped_key)
local now = now_ms()
local now_text = string.format('%d', now)
local latest_ms = now + lease_ms
local latest_text = string.format('%d', latest_ms)

local tick, jumped = unpack(redis.call('HMGET', leases_key, 'tick', 'jumped'), 1, 2)
local last_tick = tonumber(tick or now) or now
local gap = now - last_tick
local jumped_ms = gap > max_gap_ms and gap or 0
local back_ms = -gap > max_gap_ms and -gap or 0
if jumped_ms > 0 then -- jumps of one hour count together: keys may go unused for an hour
  local at_ms, by_ms = string.match(jumped or '', '^(%d+) (%d+)')
  local ago_ms = last_tick - tonumber(at_ms or 0)
  local before_ms = ago_ms >= 0 and ago_ms < HOUR_MS and tonumber(by_ms) or 0
  jumped = now_text .. ' ' .. string.format('%d', before_ms + jumped_ms)
  redis.call('HSET', leases_key, 'jumped', jumped)
end
if back_ms > 0 then
  redis.call('HSET', leases_key, 'went_back', now_text .. ' ' .. string.format('%d', back_ms))
end
if type(redis.pcall('HLEN', view_key)) == 'table' or type(redis.pcall('ZCARD', view_changes_key)) == 'table' then
  redis.call('UNLINK', view_key, view_changes_key) -- one of them is of another type
end

-- When a record expires, and corrects it after the clock was set. If the clock went back, an expiry beyond `seen_ms` was
-- written before that, so it moves back by as much. No expiry lies beyond `last_ms`, unless it is extended by `more_ms`.
-- `head` is the pattern of what stands before the expiry.
local function expiry_of(key, field, record, head, seen_ms, last_ms, more_ms)
  local until_ms = tonumber(string.match(record, '^' .. head .. '(%d+)'))
  local is_later = back_ms > 0 and until_ms > seen_ms
  local ends_ms = math.min(is_later and math.max(until_ms - back_ms, 0) or until_ms, last_ms) + (more_ms or 0)
  if ends_ms ~= until_ms then
    redis.call('HSET', key, field, (string.gsub(record, '^(' .. head .. ')%d+', '%1' .. string.format('%d', ends_ms), 1)))
  end
  return ends_ms
end

-- Corrects the gateways' leases; returns those that have lapsed.
local function lapsed_gateways()
  local lapsed = {}
  for name, record in pairs(pairs_of(gateways_key)) do
    local known_epoch = string.match(record, '^(%d+) %d+')
    if known_epoch then
      local more_ms = known_epoch ~= '0' and jumped_ms or 0
      local until_ms = expiry_of(gateways_key, name, record, '%d+ ', latest_ms, latest_ms, more_ms)
      if name ~= gateway and (until_ms < now or known_epoch == '0') then
        lapsed[#lapsed + 1] = name
      end
    end
  end
  return lapsed
end

-- Corrects the lease on the pool's maintenance.
local function correct_worker()
  local record = redis.call('HGET', leases_key, 'worker') or ''
  if string.find(record, '^%S+ %d+') then
    expiry_of(leases_key, 'worker', record, '%S+ ', latest_ms, latest_ms)
  end
end

-- Corrects the agents' leases. Returns their part of the replicas' lines.
local function agents_lines()
  local lines = {}
  for replica, record in pairs(pairs_of(agents_key)) do
    local who, mode = string.match(record, '^(%S+ %S+) %d+ (%S+ %S+) %d+ %-?%d+')
    if who then
      local ends_ms = expiry_of(agents_key, replica, record, '%S+ %S+ ', latest_ms, latest_ms)
      lines[replica] = ' ' .. who .. ' ' .. (ends_ms >= now and '+' or string.format('%d', ends_ms)) .. ' ' .. mode
    end
  end
  return lines
end

-- When the breakers open again, by replica.
local function open_untils()
  local found = {}
  for replica, record in pairs(pairs_of(breakers_key)) do
    if string.find(record, '^%d+ %d+') then
      found[replica] = string.format('%d', expiry_of(breakers_key, replica, record, '%d+ ', now, math.huge))
    end
  end
  return found
end

-- Tells placements how fast each replica computes prompts, in hundredths of the mean; in the field "?", the fastest one. If
-- all are about equally fast, there is no such key, and a placement reads nothing of speeds. Measured rates of equal
-- replicas differ a little with their load. They follow slowly, so a replica that is late again and again counts as slower.
local function renew_speeds()
  local rates, slowest, fastest, total, count = pairs_of(rates_key), math.huge, 0, 0, 0
  for name, record in pairs(pairs_of(late_key)) do -- see hedge.lua
    if rates[name] and sum_of(string.match(record, '(%d+)$')) > now then
      rates[name] = sum_of(rates[name]) / SLOWER
    end
  end
  for _, text in pairs(rates) do
    local rate = sum_of(text)
    if rate > 0 then
      slowest, fastest = math.min(slowest, rate), math.max(fastest, rate)
      total, count = total + rate, count + 1
    end
  end
  if fastest <= UNEQUAL * slowest then
    redis.call('UNLINK', speeds_key)
    return
  end
  rates['?'] = fastest
  local stood, changed = pairs_of(speeds_key), {}
  for name, rate in pairs(rates) do
    local speed = string.format('%d', math.ceil(100 * sum_of(rate) * count / total))
    if stood[name] ~= speed then
      changed[#changed + 1], changed[#changed + 2] = name, speed
    end
  end
  in_parts(changed, function(...) write('HSET', speeds_key, ...) end)
end

-- Makes all lines and writes those that differ. The line of a replica whose record cannot be read stays as it was: from it
-- maintenance writes the record again (see repair). Returns the new id and version.
local function renew_view(id, version)
  correct_worker()
  local agents, open_until = agents_lines(), open_untils()
  local replicas, stood = redis.call('HGETALL', replicas_key), pairs_of(view_key)
  stood['?'] = nil
  local changed, lines, gone = {}, {}, {}
  for i = 1, #replicas, 2 do
    local name = replicas[i]
    local line = (open_until[name] or '-') .. ' 1' .. (agents[name] or '') .. '\n' .. replicas[i + 1]
    if stood[name] ~= line and is_replica(name, replicas[i + 1]) then
      lines[#lines + 1], lines[#lines + 2] = name, line
      changed[#changed + 1] = name
    end
    stood[name] = nil
  end
  for name in pairs(stood) do
    gone[#gone + 1], changed[#changed + 1] = name, name
  end
  local noted = redis.call('ZCARD', view_changes_key)
  if id == nil or noted + #changed < #replicas / 2 or noted > #replicas + 64 then
    id, version = now_text, 0 -- every gateway gets all lines
    redis.call('UNLINK', view_changes_key)
    changed = redis.call('HKEYS', replicas_key)
  end
  local scored = {}
  if #changed > 0 then -- never a version that a gateway may know from before the store lost its last writes
    version = math.max(version + 1, now)
  end
  for i = 1, #changed do
    scored[#scored + 1], scored[#scored + 2] = string.format('%d', version), changed[i]
  end
  in_parts(scored, function(...) redis.call('ZADD', view_changes_key, ...) end)
  in_parts(lines, function(...) redis.call('HSET', view_key, ...) end)
  in_parts(gone, function(...) redis.call('HDEL', view_key, ...) end)
  redis.call('HSET', view_key, '?', string.format('%s %d %s 0 0', id, version, now_text))
  return id, version
end

-- What a gateway that knows `known` has to be told: 1 if that is everything, and the lines.
local function told(id, version_now, known)
  local known_id, known_version = string.match(known, '^(%d+)%-(%d+)$')
  known_version = tonumber(known_version or -1)
  local lines = {}
  if known_id ~= id or known_version > version_now then
    local flat = redis.call('HGETALL', view_key)
    for i = 1, #flat, 2 do
      if flat[i] ~= '?' then
        lines[#lines + 1], lines[#lines + 2] = flat[i], flat[i + 1]
      end
    end
    return 1, lines
  elseif known_version < version_now then
    local names = redis.call('ZRANGEBYSCORE', view_changes_key, '(' .. string.format('%d', known_version), '+inf')
    in_parts(names, function(...)
      local found = redis.call('HMGET', view_key, ...)
      for i, name in ipairs({ ... }) do
        lines[#lines + 1], lines[#lines + 2] = name, found[i] or ''
      end
    end)
  end
  return 0, lines
end

local expired = {}
local id, view_version, made_ms = view_head(view_key)
local is_fresh = made_ms and now >= made_ms and now - made_ms < view_lasts_ms(records)
if has_written or not is_fresh or jumped_ms > 0 or back_ms > 0 then
  expired = lapsed_gateways()
  id, view_version = renew_view(id, view_version)
  renew_speeds()
end

local status = 'stale'
local known_epoch = string.match(redis.call('HGET', gateways_key, gateway) or '', '^(%d+) %d+')
if known_epoch == epoch then
  status = 'ok'
  if not leaving then
    redis.call('HSET', gateways_key, gateway, epoch .. ' ' .. latest_text)
  else
    redis.call('HDEL', gateways_key, gateway)
    redis.call('UNLINK', grants_key, heard_key)
  end
end
if held ~= '' and not leaving then
  write('HSET', holds_key, gateway, held)
else
  redis.pcall('HDEL', holds_key, gateway)
end
redis.call('HSET', leases_key, 'tick', now_text)

-- One gateway at a time does the pool's maintenance; its lease is renewed by its own beats.
local worker, worker_until = string.match(redis.call('HGET', leases_key, 'worker') or '', '^(%S+) (%d+)')
if does_maintenance and (worker == nil or worker == gateway or tonumber(worker_until) < now) then
  worker = gateway
  if not leaving then
    redis.call('HSET', leases_key, 'worker', worker .. ' ' .. latest_text)
  else
    redis.call('HDEL', leases_key, 'worker')
  end
end

if redis.call('EXISTS', seats_key) == 1 then
-- include queue
  local base = base_of(waiting_key)
  -- Puts seats back into line that somebody else took out of it; it looks at some each time.
  local ids = redis.pcall('HRANDFIELD', seats_key, 8)
  for i = 1, #ids do
    local seat = seat_of(base, gateway, ids[i])
    if not seat then
      redis.call('HDEL', seats_key, ids[i])
    else
      local name = string.format('%d %s', seat.band, seat.queue)
      local member = member_of(gateway, ids[i], seat)
      local holder = holder_of(base, name, member, seat)
      local is_standing = type(redis.pcall('ZSCORE', line_key(base, name, holder), member)) == 'string'
      if not is_standing or sum_of(field_of(base .. 'waiting', name)) == 0 or
        type(redis.pcall('ZSCORE', base .. 'turns:' .. name, holder)) ~= 'string' then
        if holder ~= seat.tenant then
          redis.pcall('ZREM', line_key(base, name, holder), member)
        end
        stand_in_line(base, gateway, ids[i], seat, now)
        if sum_of(field_of(base .. 'waiting', name)) == 0 then
          count_seats(base, name, 1, tokens_of(seat))
        end
      end
    end
  end
end

local is_all, lines = told(id, view_version, version)
return {
  status, expired, worker or '', now, jumped or '', reaped,
  id .. '-' .. string.format('%d', view_version), is_all, lines, redis.call('HLEN', gateways_key),
  redis.call('EXISTS', waiting_key),
}
