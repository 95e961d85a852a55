-- Finds records of the pool that cannot be read, and repairs them. The gateway that does the chores runs it. Values
-- that follow from other records are computed again (load from `flight`, the count of entries from the stream). A
-- replica's record is written again as it was last read. An unreadable record that nobody knows is dropped. A key of
-- another type is deleted. Sums over dropped records are computed again: load here, in one step; for owned_tokens the
-- script returns the replicas (see recount). An agent whose records were dropped is asked to say everything again.
-- The script makes the names of reaped, progress, flight:<gateway>, bound:<slot>, held:<replica>, events:<replica> and
-- measured:<replica> from its KEYS.
--
-- KEYS
--   hash    replicas, active, backlog_tokens, owned_tokens, gateways, breakers, agents, engines, leases, asks, reports
--   hash    entries, cursors, tiers
--   string  turn
--   hash    unreadable
-- ARGV
--   flag    check_flight: look through what is in flight as well
--   text    known(replica, record)...: the replicas' records as they were last read
-- Returns {what could not be read (flat triples: key, field, how many), the replicas whose owned_tokens must be
-- summed}.

-- include time
-- include tables
-- include load
-- include owned
-- include entries

local base = string.match(replicas_key, '^(.*:)[^:]+$')
local found, must_sum_load = {}, check_flight
local last_known = {}
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

-- Takes out of a hash what does not pass the check, or puts there what `instead` returns. Returns whether anything was.
local function tidy(key, kind, is_readable, instead)
  local changed = was_foreign(key, 'hash', kind, '')
  for field, text in pairs(pairs_of(key)) do
    local is_name = not string.find(field, '[^\32-\126]')
    if not is_name or not is_readable(text, field) then
      note(kind, field, 1)
      local other = is_name and instead and instead(field)
      if other then
        redis.call('HSET', key, field, other)
      else
        redis.call('HDEL', key, field)
      end
      changed = true
    end
  end
  return changed
end

-- The replicas come first: other records are checked against them.
local is_replica = record_of('^%S+ %l+ (%d+) (%d+) (%d+) %S')
local had_replicas = type(redis.pcall('HLEN', replicas_key)) == 'number'
if tidy(replicas_key, 'replicas', is_replica, function(replica) return last_known[replica] end) then
  must_sum_load = true
  if not had_replicas then
    for replica, record in pairs(last_known) do
      redis.call('HSET', replicas_key, replica, record)
    end
  end
end
local replicas = pairs_of(replicas_key)
for replica in pairs(replicas) do
  if was_foreign(base .. 'held:' .. replica, 'zset', 'held', replica) then
    ask_again(replica)
  end
  was_foreign(base .. 'events:' .. replica, 'stream', 'events', replica)
  was_foreign(base .. 'measured:' .. replica, 'list', 'measured', replica)
end
was_foreign(base .. 'reaped', 'hash', 'reaped', '')
was_foreign(base .. 'progress', 'hash', 'progress', '')
for slot = 0, 1 do
  local key = base .. 'bound:' .. slot
  if not was_foreign(key, 'hash', 'bound', tostring(slot)) and not is_number(redis.call('HGET', key, '@') or '0') then
    redis.call('UNLINK', key)
    note('bound', tostring(slot), 1)
  end
end

tidy(breakers_key, 'breakers', record_of('^(%d+) (%d+) %d'))
tidy(agents_key, 'agents', record_of('^%S+ %S+ (%d+) %S+ %d (%d+) %-?%d+'))
tidy(engines_key, 'engines', function(text)
  local is_json, figures = pcall(cjson.decode, text)
  return is_json and type(figures) == 'table'
end)
local is_lease, is_time = record_of('^%S+ (%d+)'), record_of('^(%d+)')
tidy(leases_key, 'leases', function(text, field)
  if field == 'worker' or string.find(field, '^events:') then
    return is_lease(text)
  end
  return is_time(text) or not (field == 'tick' or string.find(field, '^applier:'))
end)
tidy(asks_key, 'asks', function(text) return string.find(text, '^%l+$') end)
tidy(reports_key, 'reports', is_time)
tidy(tiers_key, 'tiers', function(text) return string.find(text, '^[%d.e?-]+ [%d.e?-]+$') end)

-- A gateway whose lease cannot be read has none: it states its requests again, or is reaped.
tidy(gateways_key, 'gateways', record_of('^(%d+) (%d+)'), function() return '0 0' end)

-- How far streams have come, and were applied. Without a cursor a stream is read from its start, below what it says
-- last.
tidy(entries_key, 'entries', is_number)
if was_foreign(cursors_key, 'hash', 'cursors', '') then
  for replica in pairs(replicas) do
    ask_again(replica)
  end
end
for replica in pairs(pairs_of(cursors_key)) do
  local _, _, is_lost = cursor_of(cursors_key, replica)
  if is_lost then
    note('cursors', replica, 1)
    redis.call('HDEL', cursors_key, replica)
    ask_again(replica)
  end
end
for replica, record in pairs(replicas) do
  local floor = string.match(record, '^%S+ %S+ %d+ %d+ (%d+)')
  entries_of(entries_key, replica, base .. 'events:' .. replica, cursors_key, floor)
end

if not was_foreign(turn_key, 'string', 'turn', '') and not is_number(redis.call('GET', turn_key) or '0') then
  redis.call('UNLINK', turn_key)
  note('turn', '', 1)
end

-- Load: summed again where either sum, or something in flight, could not be read.
for field, lost in pairs(pairs_of(active_key)) do
  if string.sub(field, 1, 1) == '?' then
    must_sum_load = true
    if sum_of(lost) > 0 then
      note('flight', '', sum_of(lost))
    end
    redis.call('HDEL', active_key, field)
  end
end
must_sum_load = tidy(active_key, 'active', is_number) or must_sum_load
must_sum_load = tidy(backlog_tokens_key, 'backlog_tokens', is_number) or must_sum_load
for gateway in pairs(pairs_of(gateways_key)) do
  must_sum_load = was_foreign(base .. 'flight:' .. gateway, 'hash', 'flight', gateway) or must_sum_load
end
if must_sum_load then
  local active, backlog = {}, {}
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
    redis.call('HSET', active_key, replica, string.format('%d', active[replica]))
    redis.call('HSET', backlog_tokens_key, replica, string.format('%d', backlog[replica]))
  end
end

-- Owned tokens: which replicas' are to be summed again. The mark stays until that begins.
local must_sum_all = was_foreign(owned_tokens_key, 'hash', 'owned_tokens', '')
local to_sum = {}
for field, text in pairs(pairs_of(owned_tokens_key)) do
  local replica = string.match(field, '^%?(.*)$')
  if replica then
    if sum_of(text) > 0 then
      note('own', replica, sum_of(text))
      for of in pairs(replica == '' and replicas or { [replica] = true }) do
        ask_again(of)
      end
    end
    if replica == '' then
      must_sum_all = true
    end
    if replicas[replica] then
      to_sum[replica] = true
      redis.call('HSET', owned_tokens_key, field, 0)
    else
      redis.call('HDEL', owned_tokens_key, field)
    end
  elseif not is_number(text) then
    note('owned_tokens', field, 1)
    redis.call('HDEL', owned_tokens_key, field)
    if replicas[field] then
      to_sum[field] = true
    end
  end
end
local replicas_to_sum = {}
for replica in pairs(must_sum_all and replicas or to_sum) do
  mark(owned_tokens_key, replica, 0)
  replicas_to_sum[#replicas_to_sum + 1] = replica
end

-- What other scripts found and replaced.
for field, times in pairs(pairs_of(unreadable_key)) do
  local key, of = string.match(field, '^%?(%S*) (.*)$')
  if key then
    note(key, of, sum_of(times))
    redis.call('HDEL', unreadable_key, field)
  end
end

-- What was found stays to be seen: for each key how often, when last, and where.
was_foreign(unreadable_key, 'hash', 'unreadable', '')
if #found > 0 then
  local now_text = string.format('%d', now_ms())
  for i = 1, #found, 3 do
    local before = string.match(field_of(unreadable_key, found[i]) or '', '^(%d+)') or '0'
    local times = string.format('%d', (is_number(before) and tonumber(before) or 0) + found[i + 2])
    local where = string.gsub(string.sub(found[i + 1], 1, 64), '[^\33-\126]', '?')
    redis.call('HSET', unreadable_key, found[i], times .. ' ' .. now_text .. ' ' .. (where == '' and '-' or where))
  end
end
return { found, replicas_to_sum }
