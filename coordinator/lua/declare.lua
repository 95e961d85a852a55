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

local now, base = now_ms(), base_of(subsets_key)
local lease = string.format('%d %d', total, now + lease_ms)
local known = field_of(subsets_key, digest)
if known and string.sub(known, 1, 2) ~= '0 ' and size_of(subset_key) == total then
  write('HSET', subsets_key, digest, lease)
  return 1
end
write('HSET', subsets_key, digest, string.format('0 %d', now + lease_ms)) -- if this gateway dies, its pieces end
local members = {}
for i = NAMES_OFFSET + 1, #ARGV do
  members[#members + 1], members[#members + 2] = 0, ARGV[i]
end
write('ZADD', subset_key, unpack(members))
for i = NAMES_OFFSET + 1, total > LOOK_AT_ALL and #ARGV or 0 do
  note_subset(subsets_of_key, ARGV[i], digest)
  stand(base, ARGV[i], now, MAX_OPENINGS * probe_ms, digest)
end
if size_of(subset_key) < total then
  return 0
end
write('HSET', subsets_key, digest, lease)
return 1
