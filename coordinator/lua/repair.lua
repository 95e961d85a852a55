-- Finds records of the pool that cannot be read, and repairs them. The gateway that does the chores runs it. Values
-- that follow from other records are computed again (load from `flight`, the count of entries from the stream). A
-- replica's record is written again as it was last read. An unreadable record that nobody knows is dropped. A key of
-- another type is deleted. Sums over dropped records are computed again: load here, in one step; for owned_tokens the
-- script returns the replicas (see recount). An agent whose records were dropped is asked to say everything again.
-- One call checks a piece of the records: it goes on at `part` and `offset`, where the call before ended.
-- The script makes the names of reaped, progress, forgotten, draining, rates, speeds, waiting, waiting_tokens, paces, patient, fair, holds,
-- flight:<gateway>, budgets:<gateway>, bound:<slot>, held:<replica>, events:<replica> and measured:<replica> from its
-- KEYS.
--
-- KEYS
--   hash    replicas, active, backlog_tokens, owned_tokens, gateways, breakers, agents, engines, leases, asks, reports
--   hash    entries, cursors, tiers, tenants
--   string  turn
--   hash    unreadable
-- ARGV
--   number  part: of the records, 1 at first
--   number  offset: how many records of this part were checked already
--   number  at_most: about how many records to check
--   flag    check_flight: look through what is in flight as well
--   flag    has_known: whether the next argument is given
--   text    known(replica, record)...: the replicas' records as they were last read
-- Returns {what could not be read (flat triples: key, field, how many), the replicas whose owned_tokens must be summed,
-- the part at which to go on (0: all was checked), the offset there}. The part is -1 if the call must be made again with
-- `known`; then nothing was changed.

-- include time
-- include tables
-- include load
-- include owned
-- include entries

local UNSERVED_MS = 300000
local base = string.match(replicas_key, '^(.*:)[^:]+$')
local found, must_sum_load = {}, false
local replicas_to_sum, last_known = {}, {}
for i = KNOWN_OFFSET + 1, #ARGV, KNOWN_SIZE do
  last_known[ARGV[i]] = ARGV[i + 1]
end

local function note(kind, field, times)
  found[#found + 1], found[#found + 2], found[#found + 3] = kind, field, times
end

local READS = {
  string = { 'STRLEN' }, hash = { 'HLEN' }, zset = { 'ZCARD' }, list = { 'LRANGE', 0, 0 },
}

-- Whether the key was of another type; then it is gone.
local function was_foreign(key, wanted, kind, field)
  local reply
  if wanted == 'stream' then
    reply = redis.pcall('XREAD', 'COUNT', 1, 'STREAMS', key, '$')
  else
    reply = redis.pcall(READS[wanted][1], key, unpack(READS[wanted], 2))
  end
  if type(reply) ~= 'table' or not string.find(reply.err or '', 'WRONGTYPE') then
    return false
  end
  redis.call('UNLINK', key)
  note(kind, field, 1)
  return true
end

-- Has the replica's agent, if there is one, say all again.
local function ask_again(replica)
  if field_of(agents_key, replica) and not field_of(asks_key, replica) then
    write('HSET', asks_key, replica, 'restate')
  end
end

-- A check of a record: the pattern holds, its captures are numbers, and all of it is printable.
local function record_of(pattern)
  return function(text)
    local numbers = { string.match(text, pattern) }
    for _, number in ipairs(numbers) do
      if type(number) == 'string' and not is_number(number) then
        return false
      end
    end
    return numbers[1] ~= nil and not string.find(text, '[^\32-\126]')
  end
end

-- The next records of a hash: flat pairs, and the offset behind them (0: these were the last). `weight`: how many
-- records of other hashes one of these costs.
local function piece_of(key, from, weight)
  local names = redis.pcall('HKEYS', key)
  local last = math.min(#names, from + math.ceil(at_most / (weight or 1)))
  local pairs_found = {}
  if from < last then
    local values = redis.call('HMGET', key, unpack(names, from + 1, last))
    for i = 1, #values do
      pairs_found[2 * i - 1], pairs_found[2 * i] = names[from + i], values[i]
    end
  end
  return pairs_found, last < #names and last or 0
end

-- Takes out of a hash what does not pass the check, or puts there what `instead` returns. Returns whether anything was,
-- how many records were checked, and the offset behind them.
local function tidy(key, kind, from, is_readable, instead)
  local changed = from == 0 and was_foreign(key, 'hash', kind, '')
  local flat, behind = piece_of(key, from)
  for i = 1, #flat, 2 do
    local field, text = flat[i], flat[i + 1]
    local is_name = not string.find(field, '[^\32-\126]')
    if not is_name or not is_readable(text, field) then
      note(kind, field, 1)
      local other = is_name and instead and instead(field)
      if other then
        redis.call('HSET', key, field, other)
      else
        redis.call('HDEL', key, field)
        behind = behind > 0 and math.max(1, behind - 1) or 0
      end
      changed = true
    end
  end
  return changed, #flat / 2, behind
end

local PARTS = {}

local function add_part(key, kind, is_readable, instead)
  PARTS[#PARTS + 1] = function(from)
    local _, checked, behind = tidy(key, kind, from, is_readable, instead)
    return checked, behind
  end
end

local is_lease, is_time = record_of('^%S+ (%d+)'), record_of('^(%d+)')

-- The replicas come first: other records are checked against them.
local is_replica = record_of('^%S+ %l+ (%d+) (%d+) (%d+) %S')
local must_know = false
PARTS[1] = function(from)
  if has_known then
    local had_replicas = type(redis.pcall('HLEN', replicas_key)) == 'number'
    local changed, checked, behind =
      tidy(replicas_key, 'replicas', from, is_replica, function(replica) return last_known[replica] end)
    must_sum_load = must_sum_load or changed
    if not had_replicas then
      for replica, record in pairs(last_known) do
        redis.call('HSET', replicas_key, replica, record)
      end
    end
    return checked, behind
  end
  local flat, behind = piece_of(replicas_key, from, 2)
  must_know = type(redis.pcall('HLEN', replicas_key)) ~= 'number'
  for i = 1, #flat, 2 do
    must_know = must_know or string.find(flat[i], '[^\32-\126]') ~= nil or not is_replica(flat[i + 1])
  end
  return #flat, behind
end

-- The keys that a replica has of its own.
PARTS[2] = function(from)
  local flat, behind = piece_of(replicas_key, from, 4)
  for i = 1, #flat, 2 do
    local replica = flat[i]
    if was_foreign(base .. 'held:' .. replica, 'zset', 'held', replica) then
      ask_again(replica)
    end
    was_foreign(base .. 'events:' .. replica, 'stream', 'events', replica)
    was_foreign(base .. 'measured:' .. replica, 'list', 'measured', replica)
  end
  return #flat * 2, behind
end

local SINGLE_HASHES = { 'reaped', 'progress' }
PARTS[3] = function()
  for i = 1, #SINGLE_HASHES do
    was_foreign(base .. SINGLE_HASHES[i], 'hash', SINGLE_HASHES[i], '')
  end
  for slot = 0, 1 do
    local key = base .. 'bound:' .. slot
    if not was_foreign(key, 'hash', 'bound', tostring(slot)) then
      local told = redis.call('HMGET', key, '@', '@bytes')
      if not is_number(told[1] or '0') or not is_number(told[2] or '0') then
        redis.call('UNLINK', key)
        note('bound', tostring(slot), 1)
      end
    end
  end
  if not was_foreign(turn_key, 'string', 'turn', '') and not is_number(redis.call('GET', turn_key) or '0') then
    redis.call('UNLINK', turn_key)
    note('turn', '', 1)
  end
  return 8, 0
end

add_part(breakers_key, 'breakers', record_of('^(%d+) (%d+) %d'))
add_part(agents_key, 'agents', record_of('^%S+ %S+ (%d+) %S+ %d (%d+) %-?%d+'))
add_part(engines_key, 'engines', function(text)
  local is_json, figures = pcall(cjson.decode, text)
  return is_json and type(figures) == 'table'
end)
add_part(leases_key, 'leases', function(text, field)
  if field == 'worker' or string.find(field, '^events:') then
    return is_lease(text)
  end
  return is_time(text) or not (field == 'tick' or string.find(field, '^applier:'))
end)
add_part(asks_key, 'asks', function(text) return string.find(text, '^%l+$') end)
add_part(reports_key, 'reports', is_time)
add_part(base .. 'forgotten', 'forgotten', is_time)
add_part(base .. 'draining', 'draining', is_lease)
add_part(tiers_key, 'tiers', function(text) return string.find(text, '^[%d.e?-]+ [%d.e?-]+$') end)

-- What waits. Gateways put their seats back into lines that are lost.
add_part(base .. 'rates', 'rates', is_number)
add_part(base .. 'speeds', 'speeds', is_number)
for _, kind in ipairs({ 'waiting', 'waiting_tokens' }) do
  add_part(base .. kind, kind, function(text, field) return is_number(text) and string.find(field, '^%d+ %S+$') end)
end
add_part(base .. 'holds', 'holds', record_of('^(%d+) (%d+)$'))
add_part(base .. 'paces', 'paces', function(text) return #text < 64 and string.find(text, '^%d+ [%d.]+ %d+$') end)
add_part(base .. 'patient', 'patient', is_number)
add_part(base .. 'fair', 'fair', function(text) return #text < 64 and string.find(text, '^[%d.]+$') end)

-- Limits: what is in flight is counted again where a count could not be read, and with `check_flight`.
local must_count_tenants = check_flight
PARTS[#PARTS + 1] = function(from)
  local changed, checked, behind = tidy(tenants_key, 'tenants', from, function(text, field)
    local kind = string.match(field, '^(%l+) %S+ ?%S*$')
    return (kind == 'active' and is_number(text)) or
      ((kind == 'requests' or kind == 'tokens') and #text < 32 and string.find(text, '^%d+%.?%d*$'))
  end)
  must_count_tenants = must_count_tenants or changed
  return checked, behind
end
PARTS[#PARTS + 1] = function()
  local gateways = redis.pcall('HKEYS', gateways_key)
  for i = 1, #gateways do
    local key = base .. 'budgets:' .. gateways[i]
    must_count_tenants = was_foreign(key, 'hash', 'budgets', gateways[i]) or must_count_tenants
  end
  return #gateways, 0
end

-- Whether a gateway beats in another pool of this Redis, or did lately. If not, nobody gives back what it counts.
local function is_served(pool)
  local leases = string.match(base, '^(.*{)') .. pool .. string.match(base, '(}.*)$') .. 'leases'
  return sum_of(field_of(leases, 'tick')) > now_ms() - UNSERVED_MS
end

-- Counts the requests in flight of each tenant in this pool, and adds up those of all pools. Buckets that are empty go.
local function count_tenants()
  local pool, active, totals, now = string.match(base, '{(.-)}'), {}, {}, now_ms()
  for gateway in pairs(pairs_of(gateways_key)) do
    local key = base .. 'budgets:' .. gateway
    for reservation, entry in pairs(pairs_of(key)) do
      local tenant, in_flight = string.match(entry, '^(%S+) %d+ %d+ ([01])$')
      if not tenant then
        note('budgets', gateway, 1)
        redis.call('HDEL', key, reservation)
      elseif in_flight == '1' then
        active[tenant] = (active[tenant] or 0) + 1
      end
    end
  end
  for field, text in pairs(pairs_of(tenants_key)) do
    local kind, tenant, of = string.match(field, '^(%l+) (%S+) ?(%S*)$')
    if kind == 'active' and of ~= '' and of ~= pool and is_served(of) then
      totals[tenant] = (totals[tenant] or 0) + sum_of(text)
    elseif kind == 'active' or sum_of(text) <= now then
      redis.call('HDEL', tenants_key, field)
    end
  end
  for tenant, count in pairs(active) do
    totals[tenant] = (totals[tenant] or 0) + count
    write('HSET', tenants_key, 'active ' .. tenant .. ' ' .. pool, count)
  end
  for tenant, count in pairs(totals) do
    write('HSET', tenants_key, 'active ' .. tenant, count)
  end
end

-- A gateway whose lease cannot be read has none: it states its requests again, or is reaped.
add_part(gateways_key, 'gateways', record_of('^(%d+) (%d+)'), function() return '0 0' end)

-- How far streams have come, and were applied. Without a cursor a stream is read from its start, below what it says
-- last.
add_part(entries_key, 'entries', is_number)
PARTS[#PARTS + 1] = function(from)
  if from == 0 and was_foreign(cursors_key, 'hash', 'cursors', '') then
    for replica in pairs(pairs_of(replicas_key)) do
      ask_again(replica)
    end
  end
  local flat, behind = piece_of(cursors_key, from, 2)
  for i = 1, #flat, 2 do
    local _, _, is_lost = cursor_of(cursors_key, flat[i])
    if is_lost then
      note('cursors', flat[i], 1)
      redis.call('HDEL', cursors_key, flat[i])
      behind = behind > 0 and math.max(1, behind - 1) or 0
      ask_again(flat[i])
    end
  end
  return #flat, behind
end
PARTS[#PARTS + 1] = function(from)
  local flat, behind = piece_of(replicas_key, from, 3)
  for i = 1, #flat, 2 do
    local floor = string.match(flat[i + 1], '^%S+ %S+ %d+ %d+ (%d+)')
    entries_of(entries_key, flat[i], base .. 'events:' .. flat[i], cursors_key, floor)
  end
  return #flat, behind
end

-- Load: summed again where either sum, or something in flight, could not be read.
PARTS[#PARTS + 1] = function(from)
  local changed, checked, behind = tidy(active_key, 'active', from, function(text, field)
    if string.sub(field, 1, 1) ~= '?' then
      return is_number(text)
    end
    must_sum_load = true
    if sum_of(text) > 0 then
      note('flight', '', sum_of(text))
    end
    redis.call('HDEL', active_key, field)
    return true
  end)
  must_sum_load = must_sum_load or changed
  return checked, behind
end
PARTS[#PARTS + 1] = function(from)
  local changed, checked, behind = tidy(backlog_tokens_key, 'backlog_tokens', from, is_number)
  must_sum_load = must_sum_load or changed
  return checked, behind
end
PARTS[#PARTS + 1] = function()
  local gateways = redis.call('HKEYS', gateways_key)
  must_sum_load = must_sum_load or check_flight
  for i = 1, #gateways do
    must_sum_load = was_foreign(base .. 'flight:' .. gateways[i], 'hash', 'flight', gateways[i]) or must_sum_load
  end
  return #gateways, 0
end

local function sum_load()
  local replicas, active, backlog = pairs_of(replicas_key), {}, {}
  for replica in pairs(replicas) do
    active[replica], backlog[replica] = 0, 0
  end
  local is_entry = record_of('^%S+ %S+ %d+ (%d+) %S')
  for gateway in pairs(pairs_of(gateways_key)) do
    local flight_key = base .. 'flight:' .. gateway
    for id, entry in pairs(pairs_of(flight_key)) do
      local replica, incarnation, since_ms, tokens = string.match(entry, '^(%S+) (%S+) (%S+) (%S+)')
      if not is_entry(entry) then
        note('flight', gateway, 1)
        redis.call('HDEL', flight_key, id)
      elseif replicas[replica] then
        local current, current_since = string.match(replicas[replica], '^(%S+) %S+ %S+ (%S+)')
        if incarnation == current and since_ms == current_since then
          active[replica], backlog[replica] = active[replica] + 1, backlog[replica] + tonumber(tokens)
        end
      end
    end
  end
  for replica in pairs(replicas) do
    write('HSET', active_key, replica, string.format('%d', active[replica]))
    write('HSET', backlog_tokens_key, replica, string.format('%d', backlog[replica]))
  end
end

-- Owned tokens: which replicas' are to be summed again. The mark stays until that begins.
local function sum_owned(replica)
  mark(owned_tokens_key, replica, 0)
  replicas_to_sum[#replicas_to_sum + 1] = replica
end
PARTS[#PARTS + 1] = function(from)
  local must_sum_all = from == 0 and was_foreign(owned_tokens_key, 'hash', 'owned_tokens', '')
  local flat, behind = piece_of(owned_tokens_key, from)
  for i = 1, #flat, 2 do
    local field, text = flat[i], flat[i + 1]
    local replica = string.match(field, '^%?(.*)$')
    if replica then
      local lost = sum_of(text)
      if lost > 0 then
        note('own', replica, lost)
        for _, of in ipairs(replica == '' and redis.call('HKEYS', replicas_key) or { replica }) do
          ask_again(of)
        end
      end
      must_sum_all = must_sum_all or replica == ''
      if field_of(replicas_key, replica) then
        redis.call('HSET', owned_tokens_key, field, 0)
        sum_owned(replica)
      else
        redis.call('HDEL', owned_tokens_key, field)
      end
    elseif not is_number(text) then
      note('owned_tokens', field, 1)
      redis.call('HDEL', owned_tokens_key, field)
      if field_of(replicas_key, field) then
        sum_owned(field)
      end
    end
  end
  if must_sum_all then
    for _, replica in ipairs(redis.call('HKEYS', replicas_key)) do
      sum_owned(replica)
    end
  end
  return #flat / 2, behind
end

-- What other scripts found and replaced.
PARTS[#PARTS + 1] = function()
  was_foreign(unreadable_key, 'hash', 'unreadable', '')
  for field, times in pairs(pairs_of(unreadable_key)) do
    local key, of = string.match(field, '^%?(%S*) (.*)$')
    if key then
      note(key, of, sum_of(times))
      redis.call('HDEL', unreadable_key, field)
    end
  end
  return 1, 0
end

local checked = 0
while part <= #PARTS and checked < at_most and not must_know do
  local count
  count, offset = PARTS[part](offset)
  checked = checked + 1 + count
  part = offset == 0 and part + 1 or part
end
if must_know then
  return { {}, {}, -1, 0 }
end
if must_sum_load then
  sum_load()
end
if must_count_tenants then
  count_tenants()
end

-- What was found stays to be seen: for each key how often, when last, and where.
if #found > 0 then
  local now_text = string.format('%d', now_ms())
  for i = 1, #found, 3 do
    local before = string.match(field_of(unreadable_key, found[i]) or '', '^(%d+)') or '0'
    local times = string.format('%d', (is_number(before) and tonumber(before) or 0) + found[i + 2])
    local where = string.gsub(string.sub(found[i + 1], 1, 64), '[^\33-\126]', '?')
    write('HSET', unreadable_key, found[i], times .. ' ' .. now_text .. ' ' .. (where == '' and '-' or where))
  end
end
return { found, replicas_to_sum, part <= #PARTS and part or 0, offset }
