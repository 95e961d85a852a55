-- Takes back the claims that one reservation made: its request failed before the first token, so nothing was computed.
-- A claim that a later reservation has renewed is kept.
--
-- KEYS
--   hash    replicas, owned_tokens
--   zset    held:<replica>
--   hash    own:<key>...
-- ARGV
--   text    replica, reservation
--   text    keys...: in the order of own
-- Returns the number of claims withdrawn; 0 while the replica's record cannot be read.

-- include remove

return remove_keys(#KEYS - OWN_OFFSET, function(record)
  return record and string.match(record, '^%S+ claim %S+ %S+ %S+ %S+ (%S+)') == reservation
end)
