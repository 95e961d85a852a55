-- Puts a piece of a subset in order again, from the replicas' records, breakers and load. Scripts of older versions
-- change these without changing the orders, an open breaker's time comes while no script runs, and the room in a cache
-- is ordered only here.
--
-- KEYS
--   hash    subsets, subsets_of, subset_active
--   zset    subset:<digest>: and the base of its orders
-- ARGV
--   text    digest
--   number  first, last: the piece, by rank in order of names
--   number  probe_ms: see place
--   flag    is_last: sum the requests in flight on the good replicas, too

-- include time
-- include subsets

if not field_of(subsets_key, digest) then
  return
end
local now, base = now_ms(), base_of(subsets_key)
local names = redis.pcall('ZRANGE', subset_key, first, last)
for i = 1, #names do
  note_subset(subsets_of_key, names[i], digest)
  stand(base, names[i], now, MAX_OPENINGS * probe_ms, digest)
end
-- How many members an order can have.
local function most_members(order)
  local all, good = size_of(subset_key), size_of(subset_key .. ':good')
  if order == ':good' then
    return all
  end
  return order == ':out' and all - good or good
end

if is_last then
  for _, order in ipairs({ ':good', ':in_flight', ':load', ':free', ':out' }) do
    local placed = redis.pcall('ZCARD', subset_key .. order)
    if type(placed) ~= 'number' then -- it is of another type, which nothing has replaced yet
      redis.call('UNLINK', subset_key .. order)
    elseif placed > most_members(order) then
      for _, replica in ipairs(redis.call('ZRANGE', subset_key .. order, 0, -1)) do -- somebody else wrote there
        if not redis.pcall('ZSCORE', subset_key, replica) then
          redis.call('ZREM', subset_key .. order, replica)
        end
      end
    end
  end
  local scores, total = redis.pcall('ZRANGE', subset_key .. ':in_flight', 0, -1, 'WITHSCORES'), 0
  for i = 2, #scores, 2 do
    total = total + math.max(0, math.min(math.floor(tonumber(scores[i])), 1e9))
  end
  write('HSET', subset_active_key, digest, string.format('%d', total))
end
