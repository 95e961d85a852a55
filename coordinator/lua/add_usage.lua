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

local function sum_as_text(row, more)
  for i = 1, #more do
    more[i] = more[i] + (row[i] or 0)
  end
  for i = 7, 9, 2 do
    local units = math.floor(more[i + 1] / NANOS)
    more[i], more[i + 1] = more[i] + units, more[i + 1] - units * NANOS
  end
  return string.format('%d %d %d %d %d %d %d.%09d %d.%09d', unpack(more))
end

local function add_row(hour, tenant, key, model, more)
  local hash, field = usage_key .. ':' .. hour, table.concat({ tenant, key, model }, ' ')
  local row = field_of(hash, field)
  if not row and sum_of(redis.pcall('HLEN', hash)) >= most_rows then
    field = table.concat({ tenant, 'others', model }, ' ')
    row = field_of(hash, field)
  end
  write('HSET', hash, field, sum_as_text(figures_of(row or ''), more))
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
local starts, added = {}, {}
for i = ROWS_OFFSET + 1, #ARGV, ROWS_SIZE do
  local more = figures_of(ARGV[i + 5])
  if #more == 0 then
    error('unreadable figures')
  end
  starts[ARGV[i]] = ARGV[i + 1]
  added[#added + 1] = { ARGV[i], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], more }
end
for hour, start_s in pairs(starts) do
  begin_hour(hour, start_s)
end
for _, row in ipairs(added) do
  add_row(unpack(row))
end
local turn = string.format('%d', sum_of(field_of(writers_key, '#')) + 1)
write('HSET', writers_key, '#', turn, writer, number .. ' ' .. turn)
if redis.call('HLEN', writers_key) > most_writers then
  forget_writers()
end
return tonumber(number)
