-- Adds what one gateway process has counted to the ledger of usage, once. A call has a number, and names that of the call
-- before it. It is taken only if the ledger has that one last of this writer: so a repeated call adds nothing, and a
-- writer learns what a store has lost.
--
-- KEYS
--   hash    usage: the base of usage:<hour>
--   hash    writers
--   zset    hours
-- ARGV
--   text    writer
--   text    before: the number of the call that the ledger must have last; 0: none
--   text    number: that of this call; the same as before: nothing is added
--   number  kept_s: for how long hours are kept; when one begins, two that are older go
--   number  most_rows: of an hour; a row above that counts as one of the key `others`
--   number  most_writers
--   text    rows(hour, start_s, tenant, key, model, figures)...: what is added to each
-- Returns the number of this writer's call that the ledger has now; 0: none.

-- include safe

local ROW = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)%.(%d+) (%d+)%.(%d+)$'
local NANOS = 1e9

-- The figures of a row: six numbers, and two amounts of money with nine decimals. Empty if it cannot be read.
local function figures_of(text)
  local found = { string.match(text, ROW) }
  for i, figure in ipairs(found) do
    found[i] = tonumber(figure)
  end
  return found
end

local function add_up(sum, more)
  for i = 1, #more do
    sum[i] = (sum[i] or 0) + more[i]
  end
  for i = 7, 9, 2 do
    if sum[i + 1] >= NANOS then
      sum[i], sum[i + 1] = sum[i] + 1, sum[i + 1] - NANOS
    end
  end
  return sum
end

-- Adds rows to an hour: each is { field, the field above most_rows, figures }.
local function add_rows(hour, rows)
  local hash, fields, sums, new = usage_key .. ':' .. hour, {}, {}, {}
  for i, row in ipairs(rows) do
    fields[i] = row[1]
  end
  local known, count = redis.pcall('HMGET', hash, unpack(fields)), sum_of(redis.pcall('HLEN', hash))
  for i, row in ipairs(rows) do
    local field, text = row[1], known[i]
    if not text and count >= most_rows then
      field = row[2]
      text = not sums[field] and field_of(hash, field)
    elseif not text then
      count = count + 1
    end
    sums[field] = add_up(sums[field] or figures_of(text or ''), row[3])
  end
  for field, sum in pairs(sums) do
    new[#new + 1] = field
    new[#new + 1] = string.format('%d %d %d %d %d %d %d.%09d %d.%09d', unpack(sum))
  end
  write('HSET', hash, unpack(new))
end

-- How old an hour is counts from the one that begins, or from the newest of those before, if that is earlier. So a clock
-- that jumps ahead, and is set back within an hour, takes none with it.
local function begin_hour(hour, start_s)
  local newest = redis.pcall('ZREVRANGE', hours_key, 0, 0, 'WITHSCORES')
  if write('ZADD', hours_key, start_s, hour) == 1 and newest[2] then
    local oldest = string.format('(%d', math.min(tonumber(newest[2]), tonumber(start_s)) - kept_s)
    for _, old in ipairs(redis.call('ZRANGEBYSCORE', hours_key, '-inf', oldest, 'LIMIT', 0, 2)) do
      redis.call('UNLINK', usage_key .. ':' .. old)
      redis.call('ZREM', hours_key, old)
    end
  end
end

-- Forgets a tenth of the writers: those that have called least recently. A gateway calls each second, so they are gone.
local function forget_writers()
  local known, found = redis.call('HGETALL', writers_key), {}
  for i = 1, #known, 2 do
    if known[i] ~= '#' then
      found[#found + 1] = { known[i], tonumber(string.match(known[i + 1], ' (%d+)$')) or 0 }
    end
  end
  table.sort(found, function(one, other) return one[2] < other[2] end)
  for i = 1, math.ceil(#found / 10) do
    redis.call('HDEL', writers_key, found[i][1])
  end
end

local has = string.match(field_of(writers_key, writer) or '', '^(%d+) ') or '0'
if has ~= before then
  return tonumber(has)
end
local starts, hours = {}, {}
for i = ROWS_OFFSET + 1, #ARGV, ROWS_SIZE do
  local hour, tenant, key, model, more = ARGV[i], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], figures_of(ARGV[i + 5])
  if #more == 0 then
    error('unreadable figures')
  end
  starts[hour], hours[hour] = ARGV[i + 1], hours[hour] or {}
  local field, above = table.concat({ tenant, key, model }, ' '), table.concat({ tenant, 'others', model }, ' ')
  table.insert(hours[hour], { field, above, more })
end
for hour, rows in pairs(hours) do
  begin_hour(hour, starts[hour])
  add_rows(hour, rows)
end
local turn = string.format('%d', sum_of(field_of(writers_key, '#')) + 1)
write('HSET', writers_key, '#', turn, writer, number .. ' ' .. turn)
if redis.call('HLEN', writers_key) > most_writers then
  forget_writers()
end
return tonumber(number)
