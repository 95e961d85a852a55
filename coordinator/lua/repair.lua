-- A look over the pool for what cannot be read, by whoever does its chores: what is derived is made again from its truth
-- (load from what is in flight, a count of entries from the stream), a replica is written again as it was last known, and
-- only a truth that nobody knows is dropped. So is a key of another type. The sums over what was dropped are made again:
-- those of load here, in one step; of owned_tokens it is said (see recount). An agent whose records were dropped is asked
-- for all again.
--
-- KEYS[1] replicas   KEYS[2] active   KEYS[3] backlog_tokens   KEYS[4] owned_tokens   KEYS[5] gateways   KEYS[6] breakers
-- KEYS[7] agents   KEYS[8] engines   KEYS[9] leases   KEYS[10] asks   KEYS[11] reports   KEYS[12] entries
-- KEYS[13] cursors   KEYS[14] tiers   KEYS[15] turn   KEYS[16] unreadable
-- (reaped, progress, flight:<gateway>, bound:<slot>, held:<replica>, events:<replica> and measured:<replica> are spelled
-- from these)
-- ARGV[1] "1": look through what is in flight as well   ARGV[2..] pairs: replica, its record as it was last read
-- Returns {what could not be read (flat triples: key, field, how many), the replicas whose owned_tokens are to be summed}.

-- include time
-- include tables
-- include load
-- include owned
-- include entries

local base = string.match(KEYS[1], '^(.*:)[^:]+$')
local found, must_sum_load = {}, ARGV[1] == '1'
local last_known = {}
for i = 2, #ARGV, 2 do
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
  if field_of(KEYS[7], replica) and not field_of(KEYS[10], replica) then
    write('HSET', KEYS[10], replica, 'restate')
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

-- The replicas: what stands on them is checked behind them.
local is_replica = record_of('^%S+ %l+ (%d+) (%d+) (%d+) %S')
local had_replicas = type(redis.pcall('HLEN', KEYS[1])) == 'number'
if tidy(KEYS[1], 'replicas', is_replica, function(replica) return last_known[replica] end) then
  must_sum_load = true
  if not had_replicas then
    for replica, record in pairs(last_known) do
      redis.call('HSET', KEYS[1], replica, record)
    end
  end
end
local replicas = pairs_of(KEYS[1])
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

tidy(KEYS[6], 'breakers', record_of('^(%d+) (%d+) %d'))
tidy(KEYS[7], 'agents', record_of('^%S+ %S+ (%d+) %S+ %d (%d+) %-?%d+'))
tidy(KEYS[8], 'engines', function(text)
  local is_json, figures = pcall(cjson.decode, text)
  return is_json and type(figures) == 'table'
end)
local is_lease, is_time = record_of('^%S+ (%d+)'), record_of('^(%d+)')
tidy(KEYS[9], 'leases', function(text, field)
  if field == 'worker' or string.find(field, '^events:') then
    return is_lease(text)
  end
  return is_time(text) or not (field == 'tick' or string.find(field, '^applier:'))
end)
tidy(KEYS[10], 'asks', function(text) return string.find(text, '^%l+$') end)
tidy(KEYS[11], 'reports', is_time)
tidy(KEYS[14], 'tiers', function(text) return string.find(text, '^[%d.e?-]+ [%d.e?-]+$') end)

-- A gateway whose lease cannot be read has none: it states its requests again, or is reaped.
tidy(KEYS[5], 'gateways', record_of('^(%d+) (%d+)'), function() return '0 0' end)

-- How far streams have come, and were applied. Without a cursor a stream is read from its start, below what it says last.
tidy(KEYS[12], 'entries', is_number)
if was_foreign(KEYS[13], 'hash', 'cursors', '') then
  for replica in pairs(replicas) do
    ask_again(replica)
  end
end
for replica in pairs(pairs_of(KEYS[13])) do
  local _, _, is_lost = cursor_of(KEYS[13], replica)
  if is_lost then
    note('cursors', replica, 1)
    redis.call('HDEL', KEYS[13], replica)
    ask_again(replica)
  end
end
for replica, record in pairs(replicas) do
  entries_of(KEYS[12], replica, base .. 'events:' .. replica, KEYS[13], string.match(record, '^%S+ %S+ %d+ %d+ (%d+)'))
end

if not was_foreign(KEYS[15], 'string', 'turn', '') and not is_number(redis.call('GET', KEYS[15]) or '0') then
  redis.call('UNLINK', KEYS[15])
  note('turn', '', 1)
end

-- Load: summed again where either sum, or something in flight, could not be read.
for field, lost in pairs(pairs_of(KEYS[2])) do
  if string.sub(field, 1, 1) == '?' then
    must_sum_load = true
    if sum_of(lost) > 0 then
      note('flight', '', sum_of(lost))
    end
    redis.call('HDEL', KEYS[2], field)
  end
end
must_sum_load = tidy(KEYS[2], 'active', is_number) or must_sum_load
must_sum_load = tidy(KEYS[3], 'backlog_tokens', is_number) or must_sum_load
for gateway in pairs(pairs_of(KEYS[5])) do
  must_sum_load = was_foreign(base .. 'flight:' .. gateway, 'hash', 'flight', gateway) or must_sum_load
end
if must_sum_load then
  local active, backlog = {}, {}
  for replica in pairs(replicas) do
    active[replica], backlog[replica] = 0, 0
  end
  local is_entry = record_of('^%S+ %S+ %d+ (%d+) %S')
  for gateway in pairs(pairs_of(KEYS[5])) do
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
    redis.call('HSET', KEYS[2], replica, string.format('%d', active[replica]))
    redis.call('HSET', KEYS[3], replica, string.format('%d', backlog[replica]))
  end
end

-- Owned tokens: which replicas' are to be summed again. The mark stays until that begins.
local must_sum_all = was_foreign(KEYS[4], 'hash', 'owned_tokens', '')
local to_sum = {}
for field, text in pairs(pairs_of(KEYS[4])) do
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
      redis.call('HSET', KEYS[4], field, 0)
    else
      redis.call('HDEL', KEYS[4], field)
    end
  elseif not is_number(text) then
    note('owned_tokens', field, 1)
    redis.call('HDEL', KEYS[4], field)
    if replicas[field] then
      to_sum[field] = true
    end
  end
end
local replicas_to_sum = {}
for replica in pairs(must_sum_all and replicas or to_sum) do
  mark(KEYS[4], replica, 0)
  replicas_to_sum[#replicas_to_sum + 1] = replica
end

-- What other scripts found and replaced.
for field, times in pairs(pairs_of(KEYS[16])) do
  local key, of = string.match(field, '^%?(%S*) (.*)$')
  if key then
    note(key, of, sum_of(times))
    redis.call('HDEL', KEYS[16], field)
  end
end

-- What was found stays to be seen: for each key how often, when last, and where.
was_foreign(KEYS[16], 'hash', 'unreadable', '')
if #found > 0 then
  local now_text = string.format('%d', now_ms())
  for i = 1, #found, 3 do
    local before = string.match(field_of(KEYS[16], found[i]) or '', '^(%d+)') or '0'
    local times = string.format('%d', (is_number(before) and tonumber(before) or 0) + found[i + 2])
    local where = string.gsub(string.sub(found[i + 1], 1, 64), '[^\33-\126]', '?')
    redis.call('HSET', KEYS[16], found[i], times .. ' ' .. now_text .. ' ' .. (where == '' and '-' or where))
  end
end
return { found, replicas_to_sum }
