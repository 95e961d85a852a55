-- Gives back everything a dead gateway had reserved. Called for the gateways that a beat named; verified again
-- here, so a gateway that came back in between keeps what it holds.
--
-- KEYS[1] gateways   KEYS[2] flight:<gateway>   KEYS[3] replicas   KEYS[4] active   KEYS[5] backlog_tokens
-- ARGV[1] gateway
-- Returns the flight entries given back (flat pairs of id and entry); empty when the lease is good or gone.

-- include time
-- include load

local record = redis.call('HGET', KEYS[1], ARGV[1])
if not record or tonumber(string.match(record, ' (%d+)$')) >= now_ms() then
  return {}
end
local entries = redis.call('HGETALL', KEYS[2])
for i = 2, #entries, 2 do
  give_back(entries[i], KEYS[3], KEYS[4], KEYS[5])
end
redis.call('DEL', KEYS[2])
redis.call('HDEL', KEYS[1], ARGV[1])
return entries
