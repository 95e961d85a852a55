-- A gateway states its whole set of live reservations under a new epoch; whatever else stands under its
-- name is dropped, and a place still buffered somewhere under an older epoch will be refused.
--
-- KEYS[1] gateways   KEYS[2] flight:<gateway>   KEYS[3] replicas   KEYS[4] active   KEYS[5] backlog_tokens
-- ARGV[1] gateway   ARGV[2] epoch   ARGV[3] lease_ms   ARGV[4] number of ids to keep
-- ARGV[5..] the ids of places on their way (kept as they stand), then groups of 5 a live reservation:
--           id, replica, incarnation, backlog_tokens, tip; one on an incarnation that is not current is not counted
-- Returns the number of reservations standing afterwards, or -1 when a newer epoch is known.

-- include time
-- include load

check_hashes(KEYS[1], KEYS[2], KEYS[3])
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known and tonumber(string.match(known, '^%d+') or 0) > tonumber(ARGV[2]) then
  return -1
end

local kept_until = 4 + tonumber(ARGV[4])
local keep, stated = {}, {}
for i = 5, kept_until do
  keep[ARGV[i]] = true
end
for i = kept_until + 1, #ARGV, 5 do
  stated[ARGV[i]] = entry_of(KEYS[3], unpack(ARGV, i + 1, i + 4))
end

-- What stands as stated is left alone: with thousands in flight nearly all of them do.
local standing = redis.call('HGETALL', KEYS[2])
for i = 1, #standing, 2 do
  local id, entry = standing[i], standing[i + 1]
  if stated[id] == entry then
    stated[id] = nil
  elseif not keep[id] then
    redis.call('HDEL', KEYS[2], id)
    give_back(entry, KEYS[3], KEYS[4], KEYS[5])
  end
end
for id, entry in pairs(stated) do
  if not keep[id] then
    count_in(id, entry, KEYS[2], KEYS[4], KEYS[5])
  end
end

redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. string.format('%d', now_ms() + tonumber(ARGV[3])))
return redis.call('HLEN', KEYS[2])
