-- Drops a replica's ownership of keys that its cache no longer holds: the least recently used beyond its capacity,
-- those of an older incarnation, and those that a cache miss has disproved.
--
-- KEYS
--   hash    replicas, owned_tokens
--   zset    held:<replica>
--   hash    own:<key>...
-- ARGV
--   text    replica
--   number  before_ms: keys that were used at this time or later are kept
--   text    keys...: in the order of own
-- Returns the number of keys dropped; 0 while the replica's record cannot be read.

-- include remove

return remove_keys(#KEYS - OWN_OFFSET, function(_, key)
  local used_ms = redis.call('ZSCORE', held_key, key)
  return used_ms and tonumber(used_ms) < before_ms
end)
