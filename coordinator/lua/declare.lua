-- Makes a subset of the replicas known, a piece at a time, and renews its lease. A subset that is known already only has
-- its lease renewed. It counts as known once all its pieces are there.
--
-- KEYS
--   hash    subsets, subsets_of
--   zset    subset:<digest>: and the base of its orders
-- ARGV
--   text    digest
--   number  total: the replicas in the whole subset
--   number  lease_ms
--   number  probe_ms: see place
--   text    names...: those of this piece
-- Returns 1 once the subset is known, else 0.

-- include time
-- include subsets

local now = now_ms()
local lease = string.format('%d %d', total, now + lease_ms)
if field_of(subsets_key, digest) then
  write('HSET', subsets_key, digest, lease)
  return 1
end
local members = {}
for i = NAMES_OFFSET + 1, #ARGV do
  members[#members + 1], members[#members + 2] = 0, ARGV[i]
end
write('ZADD', subset_key, unpack(members))
if total > LOOK_AT_ALL then
  for i = NAMES_OFFSET + 1, #ARGV do
    local digests = field_of(subsets_of_key, ARGV[i]) or ''
    if not string.find(' ' .. digests .. ' ', ' ' .. digest .. ' ', 1, true) then
      write('HSET', subsets_of_key, ARGV[i], digests == '' and digest or digests .. ' ' .. digest)
    end
    stand(base_of(subsets_key), ARGV[i], now, MAX_OPENINGS * probe_ms)
  end
end
if redis.call('ZCARD', subset_key) < total then
  return 0
end
write('HSET', subsets_key, digest, lease)
return 1
