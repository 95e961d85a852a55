-- Removing keys from what a replica owns, for scripts that declare replicas, owned_tokens, held:<replica> and
-- own:<key>... as KEYS, and `replica` and `keys...` as ARGV.

-- include load
-- include owned

-- Removes the first `count` keys for which `goes(record, key)` is true; `record` is false if the replica has none
-- there.
-- Returns how many keys were removed; 0 while the replica's own record cannot be read.
local function remove_keys(count, goes)
  local incarnation, since_ms, is_unreadable = life_of(replicas_key, replica)
  if is_unreadable then
    return 0
  end
  check_hashes(owned_tokens_key)
  redis.call('ZCARD', held_key)
  local removed, freed_tokens = 0, 0
  for i = 1, count do
    local own_key, key = KEYS[OWN_OFFSET + i], ARGV[KEYS_OFFSET + i]
    local record = field_of(own_key, replica)
    if goes(record, key) then
      if record then
        redis.call('HDEL', own_key, replica)
        freed_tokens = freed_tokens + counted_span(record, incarnation, since_ms, owned_tokens_key, replica)
      end
      redis.call('ZREM', held_key, key)
      removed = removed + 1
    end
  end
  if freed_tokens > 0 then
    add(owned_tokens_key, replica, -freed_tokens)
  end
  return removed
end
