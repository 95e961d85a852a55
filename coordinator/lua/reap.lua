-- Gives back what a dead gateway had reserved, so many reservations a call, and moves them to `reaped`, where they wait for
-- somebody who sees to their claims. Called for the gateways that a beat named; verified again here, so a gateway that
-- came back in between keeps what it holds. The first call marks its record with the epoch 0, which no gateway has: one
-- that comes back from then on has to reassert. The record goes when nothing stands under its name any more.
--
-- KEYS[1] gateways   KEYS[2] flight:<gateway>   KEYS[3] replicas   KEYS[4] active   KEYS[5] backlog_tokens
-- KEYS[6] reaped
-- ARGV[1] gateway   ARGV[2] reservations to give back, at most
-- Returns how many are left; 0 as well when the lease is good or the gateway not known.

-- include time
-- include load

check_hashes(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
local epoch, until_text = string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^(%d+) (%d+)')
if epoch == nil or (epoch ~= '0' and tonumber(until_text) >= now_ms()) then
  return 0
end
local ids = redis.call('HKEYS', KEYS[2])
local count = math.min(#ids, tonumber(ARGV[2]))
if count > 0 then
  local entries = redis.call('HMGET', KEYS[2], unpack(ids, 1, count))
  for i = 1, count do
    give_back(entries[i], KEYS[3], KEYS[4], KEYS[5])
    redis.call('HSET', KEYS[6], ids[i], entries[i] .. ' ' .. ARGV[1])
  end
  redis.call('HDEL', KEYS[2], unpack(ids, 1, count))
end
if count == #ids then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], '0 ' .. until_text)
end
return #ids - count
