-- The shared circuit breaker of a replica: what one gateway learns from a request, all of them know.
-- A record is "<consecutive failures> <open_until_ms> <1 while a probe is out, else 0>"; a healthy replica has none.
-- While it is open only a probe's failure counts: requests sent before it opened tell nothing new.
--
-- KEYS[1] replicas   KEYS[2] breakers
-- ARGV[1] replica   ARGV[2] incarnation   ARGV[3] "failure" | "success"   ARGV[4] failures that open it
-- ARGV[5] open_ms (doubles with every failed probe, at most 12 times as long)
-- Returns the open_until_ms that now holds (0: closed), or -1 when the incarnation is not the current one.

-- include time

local record = redis.call('HGET', KEYS[1], ARGV[1])
if not record or string.match(record, '^%S+') ~= ARGV[2] then
  return -1
end
if ARGV[3] == 'success' then
  redis.call('HDEL', KEYS[2], ARGV[1])
  return 0
end
local failures, open_until, probing =
  string.match(redis.call('HGET', KEYS[2], ARGV[1]) or '0 0 0', '^(%d+) (%d+) (%d)')
failures, open_until = tonumber(failures), tonumber(open_until)
if open_until > 0 and probing == '0' then
  return open_until
end
failures = failures + 1
local beyond = failures - tonumber(ARGV[4])
if beyond >= 0 then
  open_until = now_ms() + tonumber(ARGV[5]) * math.min(2 ^ beyond, 12)
end
redis.call('HSET', KEYS[2], ARGV[1], failures .. ' ' .. string.format('%d', open_until) .. ' 0')
return open_until
