-- Finds what cannot be read in a pool's keys, counts and names it, and makes right what depends on it: coordinator/README.md
-- (What cannot be read) tells what follows for each kind of records. HASHES has the kinds: "keep" stays, all others go, and
-- then "load", "tenants", "void" and so on follow. A replica is voided at most once in `rest_ms`: the field "void <replica>"
-- of `unreadable` tells when it was voided last. Until then its owned_tokens are "void", which nothing can be added to.
-- Sums are numbers and nothing else, because scripts add to them. A version that cannot keep to this needs another key.
--
-- One call checks a piece of the records: it goes on at `part` and `offset`, where the call before ended. The names of
-- keys that are not among its KEYS are made from these.
--
-- KEYS
--   hash    replicas, gateways, agents, asks, active, backlog_tokens, owned_tokens, view, tenants, unreadable
-- ARGV
--   number  part: of the records, 1 at first
--   number  offset: how many records of this part are left; 0: all
--   number  at_most: about how many records to check
--   flag    is_full: check what is kept and all sums of what is in flight as well
--   number  rest_ms
-- Returns {what could not be read (flat triples: kind, field, how many), the part at which to go on (0: all was checked),
-- the offset there}.

-- include time
-- include tables
-- include load
-- include view

local UNSERVED_MS, MOST_VOIDED = 300000, 64
local base, now = base_of(replicas_key), now_ms()
local found, must_sum, voided = {}, {}, 0

local function note(kind, field, times)
  found[#found + 1], found[#found + 2], found[#found + 3] = kind, field, times
end

local function is_figure(text)
  return is_number(text) or (#text < 64 and string.find(text, '^%d+%.%d+$') ~= nil)
end

-- A check of a record: it is printable, begins so, and its captures are numbers.
local function begins(pattern)
  return function(text)
    local parts = { string.match(text .. ' ', pattern) }
    for _, part in ipairs(parts) do
      if type(part) == 'string' and not is_figure(part) then
        return false
      end
    end
    return parts[1] ~= nil and not string.find(text, '[^\32-\126]')
  end
end

local function is_engine(text)
  local is_json, counters = pcall(cjson.decode, text)
  return is_json and type(counters) == 'table'
end

local is_lease, is_time = begins('^%S+ (%d+) '), begins('^(%d+) ')
local LEASES = { tick = is_time, worker = is_lease, orders = is_lease }
local TENANTS = { active = is_number, requests = is_figure, tokens = is_figure }

-- Hashes: their name, the check of a record, and what follows if one is removed. With `fields`, only these are checked.
local HASHES = {
  { 'replicas', function(text, field) return is_replica(field, text) end, 'restore' },
  { 'gateways', begins('^(%d+) (%d+) '), 'lapse' },
  { 'breakers', begins('^(%d+) (%d+) %d ') },
  { 'agents', begins('^%S+ %S+ (%d+) %S+ %d (%d+) %-?%d+ ') },
  { 'engines', is_engine },
  { 'leases', function(text, field) return LEASES[field](text) end, fields = { 'tick', 'worker', 'orders' } },
  { 'asks', begins('^()%l+ ') },
  { 'reports', is_time },
  { 'entries', is_number },
  { 'cursors', begins('^(%d+)%-(%d+) (%d+) ') },
  { 'tiers', begins('^()[%d.e?-]+ [%d.e?-]+ ') },
  { 'forgotten', is_time },
  { 'reaped', fields = {} },
  { 'progress', fields = {} },
  { 'bound:0', is_number, fields = { '@', '@bytes' } },
  { 'bound:1', is_number, fields = { '@', '@bytes' } },
  { 'rates', is_time },
  { 'speeds', is_time },
  { 'waiting', is_number },
  { 'waiting_tokens', is_number },
  { 'holds', begins('^(%d+) (%d+) ') },
  { 'paces', begins('^(%d+) ([%d.]+) (%d+) ') },
  { 'patient', is_number },
  { 'fair', is_figure },
  { 'tenants', function(text, field)
    local check = TENANTS[string.match(field, '^%l*')]
    return not check or check(text)
  end, 'tenants' },
  { 'draining', is_lease, 'keep', fields = not is_full and {} or nil },
  { 'active', is_number, 'load' },
  { 'backlog_tokens', is_number, 'load' },
  { 'owned_tokens', is_number, 'void' },
}

-- What follows, for the field of a record; "": for all.
local FOLLOW = {}

function FOLLOW.load()
  must_sum.load = true
end

function FOLLOW.tenants()
  must_sum.tenants = true
end

function FOLLOW.lapse(gateway)
  if gateway ~= '' and not string.find(gateway, '[^\33-\126]') then
    redis.call('HSET', gateways_key, gateway, '0 0')
  end
end

function FOLLOW.restore(replica)
  local lines = replica == '' and pairs_of(view_key) or { [replica] = field_of(view_key, replica) or '' }
  for name, line in pairs(lines) do
    local record = string.match(line, '\n(.*)$') or ''
    if is_replica(name, record) then
      redis.call('HSET', replicas_key, name, record)
    end
  end
  must_sum.load = true
end

-- The residency is to be void as soon as it may be.
function FOLLOW.doubt(replica)
  local names = replica == '' and redis.pcall('HKEYS', replicas_key) or { replica }
  for i = 1, #names do
    write('HSET', owned_tokens_key, names[i], 'void')
  end
end

function FOLLOW.void(replica)
  local head, since_ms, behind = string.match(field_of(replicas_key, replica) or '', '^(%S+ %S+ %d+) (%d+)(.*)')
  local last_ms = sum_of(field_of(unreadable_key, 'void ' .. replica))
  if replica == '' or (head and (math.abs(now - last_ms) < rest_ms or voided == MOST_VOIDED)) then
    FOLLOW.doubt(replica)
  elseif head then
    local since_text = string.format(' %d', math.max(now, tonumber(since_ms)) + 1)
    redis.call('HSET', replicas_key, replica, head .. since_text .. behind)
    redis.call('HSET', owned_tokens_key, replica, 0)
    redis.call('HSET', unreadable_key, 'void ' .. replica, string.format('%d', now))
    if field_of(agents_key, replica) and not field_of(asks_key, replica) then
      write('HSET', asks_key, replica, 'restate')
    end
    must_sum.load, voided = true, voided + 1 -- what is in flight belongs to the same life
  end
end

local READS = { string = { 'STRLEN' }, hash = { 'HLEN' }, zset = { 'ZCARD' }, list = { 'LRANGE', 0, 0 } }

-- Deletes a key of another type.
local function check_type(key, wanted, kind, of, follows)
  local reply
  if wanted == 'stream' then
    reply = redis.pcall('XREAD', 'COUNT', 1, 'STREAMS', key, '$')
  else
    reply = redis.pcall(READS[wanted][1], key, unpack(READS[wanted], 2))
  end
  if type(reply) == 'table' and string.find(reply.err or '', 'WRONGTYPE') then
    redis.call('UNLINK', key)
    note(kind, of, 1)
    if follows then
      FOLLOW[follows](of)
    end
  end
end

-- Which of so many records are next: those behind the first number, up to the second. A pass goes from the last to the
-- first, so what is removed moves only records that were checked already. `left` is how many it has not checked yet; 0: all.
local function piece_of(count, left, at_once)
  local last = left > 0 and math.min(left, count) or count
  return math.max(0, last - at_once), last
end

-- This and the next two return how many records they have checked, and how many are left.
local function check_hash(left, one)
  local name, is_readable, follows = unpack(one, 1, 3)
  local key, kind = name == 'tenants' and tenants_key or base .. name, string.match(name, '^[^:]+')
  if left == 0 then
    check_type(key, 'hash', kind, string.match(name, ':(.*)$') or '', follows)
  end
  local fields = one.fields or redis.call('HKEYS', key)
  local first, last = piece_of(#fields, left, at_most)
  local records = last > 0 and redis.call('HMGET', key, unpack(fields, first + 1, last)) or {}
  for i = 1, #records do
    local field, text = fields[first + i], records[i]
    if text and (string.find(field, '[^\32-\126]') or not is_readable(text, field)) then
      if text ~= 'void' then
        note(kind, field, 1)
      end
      if follows ~= 'keep' then
        redis.call('HDEL', key, field)
      end
      if FOLLOW[follows] then
        FOLLOW[follows](field)
      end
    end
  end
  return #records, first
end

-- The keys of its own that each replica, or each gateway, has: the hash with their names, and the kinds of keys.
local function check_own_keys(left, one)
  local names, kinds = redis.pcall('HKEYS', one[1]), { unpack(one, 2) }
  local first, last = piece_of(#names, left, math.ceil(at_most / 4))
  for i = first + 1, last do
    for _, kind in ipairs(kinds) do
      check_type(base .. kind[1] .. ':' .. names[i], kind[2], kind[1], names[i], kind[3])
    end
  end
  return #kinds * (last - first), first
end

-- What scripts have told, and the only string.
local function check_notes()
  check_type(unreadable_key, 'hash', 'unreadable', '')
  check_type(base .. 'turn', 'string', 'turn', '')
  if not is_number(redis.call('GET', base .. 'turn') or '0') then
    redis.call('UNLINK', base .. 'turn')
    note('turn', '', 1)
  end
  must_sum.load, must_sum.tenants = is_full, is_full
  for field, text in pairs(pairs_of(unreadable_key)) do
    local kind, of = string.match(field, '^%?(%S*) (.*)$')
    if kind then
      note(kind, of, math.max(1, sum_of(text)))
      redis.call('HDEL', unreadable_key, field)
      must_sum.load = must_sum.load or kind == 'flight'
      if kind == 'own' or kind == 'held' then
        FOLLOW.doubt(of)
      end
    elseif string.find(field, '^void ') and math.abs(now - sum_of(text)) >= rest_ms then
      redis.call('HDEL', unreadable_key, field)
    end
  end
  return 1, 0
end

local PARTS = {
  { check_notes },
  { check_own_keys, { replicas_key, { 'held', 'zset', 'doubt' }, { 'events', 'stream' }, { 'measured', 'list' } } },
  { check_own_keys, { gateways_key, { 'flight', 'hash', 'load' }, { 'budgets', 'hash', 'tenants' } } },
}
for _, one in ipairs(HASHES) do
  PARTS[#PARTS + 1] = { check_hash, one }
end

-- Makes active and backlog_tokens again. Entries of the current incarnation count, whenever that was registered.
local function sum_load()
  local lives, active, backlog = {}, {}, {}
  for replica, record in pairs(pairs_of(replicas_key)) do
    lives[replica] = { string.match(record, '^(%S+) %S+ %d+ (%d+) %d+ %S') }
    active[replica], backlog[replica] = 0, 0
  end
  for gateway in pairs(pairs_of(gateways_key)) do
    local flight_key = base .. 'flight:' .. gateway
    for id, entry in pairs(pairs_of(flight_key)) do
      local replica, incarnation, since_ms, tokens, tip = string.match(entry, '^(%S+) (%S+) (%d+) (%d+) (%S.*)')
      if not replica or not is_number(tokens) then
        note('flight', gateway, 1)
      elseif lives[replica] and incarnation == lives[replica][1] then
        if since_ms ~= lives[replica][2] then
          redis.call('HSET', flight_key, id, table.concat({ replica, incarnation, lives[replica][2], tokens, tip }, ' '))
        end
        active[replica], backlog[replica] = active[replica] + 1, backlog[replica] + tonumber(tokens)
      end
    end
  end
  for replica in pairs(lives) do
    write('HSET', active_key, replica, string.format('%d', active[replica]))
    write('HSET', backlog_tokens_key, replica, string.format('%d', backlog[replica]))
  end
end

-- Whether a gateway beats in another pool of this Redis, or did lately. If not, nobody gives back what it counts.
local function is_served(pool)
  local leases = string.match(base, '^(.*{)') .. pool .. string.match(base, '(}.*)$') .. 'leases'
  return sum_of(field_of(leases, 'tick')) > now - UNSERVED_MS
end

-- Counts the requests in flight of each account in this pool, and adds up those of all pools. Buckets that are empty go.
local function sum_tenants()
  local pool, active, totals = string.match(base, '{(.-)}'), {}, {}
  for gateway in pairs(pairs_of(gateways_key)) do
    for _, entry in pairs(pairs_of(base .. 'budgets:' .. gateway)) do
      local account, in_flight, others = string.match(entry, '^(%S+) %d+ %d+ ([01])(.*)$')
      if not account then
        note('budgets', gateway, 1)
      elseif in_flight == '1' then
        active[account] = (active[account] or 0) + 1
        for other in string.gmatch(others, ' / (%S+)') do
          active[other] = (active[other] or 0) + 1
        end
      end
    end
  end
  for field, text in pairs(pairs_of(tenants_key)) do
    local kind, account, of = string.match(field, '^(%l+) (%S+) ?(%S*)$')
    if kind == 'active' and of ~= '' and of ~= pool and is_served(of) then
      totals[account] = (totals[account] or 0) + sum_of(text)
    elseif kind == 'active' or (TENANTS[kind] and sum_of(text) <= now) then
      redis.call('HDEL', tenants_key, field)
    end
  end
  for account, count in pairs(active) do
    totals[account] = (totals[account] or 0) + count
    write('HSET', tenants_key, 'active ' .. account .. ' ' .. pool, count)
  end
  for account, count in pairs(totals) do
    write('HSET', tenants_key, 'active ' .. account, count)
  end
end

local checked = 0
while part <= #PARTS and checked < at_most do
  local check, one, count = unpack(PARTS[part], 1, 2)
  count, offset = check(offset, one)
  checked = checked + 1 + count
  part = offset == 0 and part + 1 or part
end
if must_sum.load then
  sum_load()
end
if must_sum.tenants then
  sum_tenants()
end

-- What was found stays to be seen: for each kind how often, when last, and where.
for i = 1, #found, 3 do
  local before = string.match(field_of(unreadable_key, found[i]) or '', '^(%d+)') or '0'
  local times = string.format('%d', (is_number(before) and tonumber(before) or 0) + found[i + 2])
  local where = string.gsub(string.sub(found[i + 1], 1, 64), '[^\33-\126]', '?')
  write('HSET', unreadable_key, found[i], times .. ' ' .. string.format('%d', now) .. ' ' .. (where == '' and '-' or where))
end
return { found, part <= #PARTS and part or 0, offset }
