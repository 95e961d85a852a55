-- Counts a request that was placed without the store, instead of whatever stands under its id: the placement that
-- came too late to be used. Under a new epoch, so that a place still buffered somewhere is refused.
--
-- KEYS[1] gateways   KEYS[2] flight:<gateway>   KEYS[3] replicas   KEYS[4] active   KEYS[5] backlog_tokens
-- ARGV[1] gateway   ARGV[2] epoch   ARGV[3] reservation id   ARGV[4] replica   ARGV[5] incarnation
-- ARGV[6] backlog_tokens   ARGV[7] tip
-- Returns 1, or 0 when nothing was done: the gateway must reassert (it is not known, or being reaped), or the incarnation is
-- not the current one.

-- include load

check_hashes(KEYS[1], KEYS[2], KEYS[3])
local epoch, until_ms = string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^(%d+) (%d+)')
if epoch == nil or epoch == '0' or tonumber(epoch) > tonumber(ARGV[2]) then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. until_ms)
local standing = redis.call('HGET', KEYS[2], ARGV[3])
if standing then
  redis.call('HDEL', KEYS[2], ARGV[3])
  give_back(standing, KEYS[3], KEYS[4], KEYS[5])
end
local entry = entry_of(KEYS[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
if entry == nil then
  return 0
end
count_in(ARGV[3], entry, KEYS[2], KEYS[4], KEYS[5])
return 1
