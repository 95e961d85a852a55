-- Takes, renews or gives up the lease under which one process watches this Redis. Without a TTL of its own: Redis may
-- evict what has one. The SET is an event as well: a watcher that does not hear it knows that notifications are off.
-- A lease that lasts longer than any is from before the clock went back, and is cut to what one lasts.
--
-- KEYS[1] watcher
-- ARGV[1] who   ARGV[2] lease_ms   ARGV[3] "1": give it up
-- Returns 1 where ARGV[1] holds it, else 0.

-- include time
-- include safe

local now = now_ms()
local held = redis.pcall('GET', KEYS[1])
local holder, until_ms = string.match(type(held) == 'string' and held or '', '^(%S+) (%d+)')
local latest_ms = now + tonumber(ARGV[2])
if holder ~= nil and holder ~= ARGV[1] and tonumber(until_ms) >= now then
  if tonumber(until_ms) > latest_ms then
    redis.call('SET', KEYS[1], holder .. ' ' .. string.format('%d', latest_ms))
  end
  return 0
end
if ARGV[3] == '1' then
  redis.call('DEL', KEYS[1])
  return 0
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. string.format('%d', latest_ms))
return 1
