-- Takes, renews or gives up the lease under which one process watches this Redis, and notes there what it has found: it
-- may do so when the memory is full. The key has no TTL, because Redis may
-- evict keys that have one. The SET is also an event: a watcher that does not hear it knows that notifications are off.
-- A lease that lasts longer than lease_ms was written before the clock went back, and is cut to lease_ms.
--
-- KEYS
--   string  watcher
-- ARGV
--   text    watcher_name
--   number  lease_ms
--   text    report: JSON; "": none yet
--   flag    leaving: give it up
-- Returns 1 if this watcher holds the lease, else 0.

-- include time
-- include safe

local now = now_ms()
local held = redis.pcall('GET', watcher_key)
local holder, until_ms = string.match(type(held) == 'string' and held or '', '^(%S+) (%d+)')
local latest_ms = now + lease_ms
if holder ~= nil and holder ~= watcher_name and tonumber(until_ms) >= now then
  if tonumber(until_ms) > latest_ms then
    redis.call('SET', watcher_key, holder .. ' ' .. string.format('%d', latest_ms))
  end
  return 0
end
if leaving then
  redis.call('DEL', watcher_key)
  return 0
end
local lease = watcher_name .. ' ' .. string.format('%d', latest_ms)
redis.call('SET', watcher_key, report == '' and lease or lease .. ' ' .. report)
return 1
