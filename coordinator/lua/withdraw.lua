-- Takes back the claims that one reservation made: its request failed before the first token, so nothing was computed.
-- A claim that a later reservation has renewed is kept. Without a reservation all that is said of the keys is taken back:
-- the engine was found not to serve them. The script makes the names of own:<key> from its KEYS.
--
-- KEYS
--   hash    replicas, owned_tokens
--   zset    held:<replica>
-- ARGV
--   text    replica
--   text    reservation: "": of anybody
--   text    keys...
-- Returns the number of keys withdrawn; 0 while the replica's record cannot be read.

-- include remove

return remove_keys({ unpack(ARGV, KEYS_OFFSET + 1) }, function(record)
  return record and (reservation == '' or string.match(record, '^%S+ claim %S+ %S+ %S+ %S+ (%S+)') == reservation)
end)
