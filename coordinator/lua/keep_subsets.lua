-- Renews the leases of the subsets that a gateway uses, removes those that no gateway uses any more, and says which
-- gateway keeps the orders right (see reorder): one at a time, by a lease.
--
-- KEYS
--   hash    subsets, subsets_of, subset_active, leases
-- ARGV
--   text    gateway
--   number  lease_ms: of the right to reorder
--   number  subset_lease_ms
--   text    digests...: of the subsets that the gateway uses
-- Returns {the digests that are not known: the gateway has to declare them again,
--          flat pairs of digest and number of replicas, for each subset with orders; empty unless this gateway keeps them}

-- include time
-- include subsets

check_hashes(leases_key)
local now, base = now_ms(), base_of(subsets_key)
for _, key in ipairs({ subsets_key, subsets_of_key, subset_active_key }) do
  if type(redis.pcall('HLEN', key)) ~= 'number' then -- it is of another type: gateways declare their subsets again
    redis.call('UNLINK', key)
  end
end

local unknown = {}
for i = DIGESTS_OFFSET + 1, #ARGV do
  local count = tonumber(string.match(redis.call('HGET', subsets_key, ARGV[i]) or '', '^(%d+) %d+$') or 0)
  if count > 0 and size_of(base .. 'subset:' .. ARGV[i]) == count then
    redis.call('HSET', subsets_key, ARGV[i], string.format('%d %d', count, now + subset_lease_ms))
  else
    unknown[#unknown + 1] = ARGV[i]
  end
end

local keeper, until_ms = string.match(redis.call('HGET', leases_key, 'orders') or '', '^(%S+) (%d+)$')
until_ms = tonumber(until_ms)
if keeper and keeper ~= gateway and until_ms >= now and until_ms <= now + lease_ms then -- else the clock went back
  return { unknown, {} }
end
redis.call('HSET', leases_key, 'orders', gateway .. ' ' .. string.format('%d', now + lease_ms))

-- Takes a subset apart.
local function remove(digest)
  local subset = base .. 'subset:' .. digest
  local members = redis.pcall('ZRANGE', subset, 0, -1)
  if #members == 0 then -- they were lost
    members = redis.call('HKEYS', subsets_of_key)
  end
  for i = 1, #members do
    local left = {}
    for each in string.gmatch(redis.call('HGET', subsets_of_key, members[i]) or '', '%S+') do
      if each ~= digest then
        left[#left + 1] = each
      end
    end
    if #left > 0 then
      redis.call('HSET', subsets_of_key, members[i], table.concat(left, ' '))
    else
      redis.call('HDEL', subsets_of_key, members[i])
    end
  end
  redis.call('UNLINK', subset, subset .. ':good', subset .. ':in_flight', subset .. ':load', subset .. ':free',
    subset .. ':out')
  redis.call('HDEL', subsets_key, digest)
  redis.call('HDEL', subset_active_key, digest)
end

-- A lease that ends later than this was given before the clock went back. Gateways of other versions may give longer
-- ones than this gateway.
local last_ms = now + 6 * subset_lease_ms
local subsets, with_orders = redis.call('HGETALL', subsets_key), {}
for i = 1, #subsets, 2 do
  local count, until_ms = string.match(subsets[i + 1], '^(%d+) (%d+)$')
  if not count or tonumber(until_ms) < now or tonumber(until_ms) > last_ms then
    remove(subsets[i])
  elseif tonumber(count) > LOOK_AT_ALL then
    with_orders[#with_orders + 1], with_orders[#with_orders + 2] = subsets[i], tonumber(count)
  end
end
return { unknown, with_orders }
