-- Removing keys from what a replica owns, for scripts that declare replicas, owned_tokens and held:<replica> as KEYS, and
-- `replica` as ARGV. The names of own:<key> are made from the name of `replicas`.

-- include load
-- include owned
-- include parts

local pool_base = string.match(replicas_key, '^(.*:)[^:]+$')
local own_base = pool_base .. 'own:'

-- Removes those of `keys` for which `goes(record, index)` is true; `record` is false if the replica has none there.
-- Members of `held` that are no prefix keys are removed in any case, and counted as unreadable.
-- Returns how many keys were removed; 0 while the replica's own record cannot be read.
local function remove_keys(keys, goes)
  local incarnation, since_ms = life_of(replicas_key, replica)
  if not incarnation and field_of(replicas_key, replica) then
    return 0
  end
  check_hashes(owned_tokens_key)
  redis.call('ZCARD', held_key)
  local removed, records, unreadable = {}, {}, 0
  for i = 1, #keys do
    local key = keys[i]
    local is_key = #key == 32 and not string.find(key, '[^0-9a-f]')
    local record = is_key and redis.pcall('HGET', own_base .. key, replica)
    if type(record) == 'table' then -- an error
      if not string.find(record.err, 'WRONGTYPE') then
        error(record.err) -- the key has moved to another node of a cluster: nothing is removed yet
      end
      record = false
    end
    if not is_key or goes(record, i) then
      removed[#removed + 1], records[key] = key, record or nil
      unreadable = unreadable + (is_key and 0 or 1)
    end
  end
  local freed_tokens = 0
  for key, record in pairs(records) do
    redis.call('HDEL', own_base .. key, replica)
    freed_tokens = freed_tokens + counted_span(record, incarnation, since_ms, owned_tokens_key, replica)
  end
  in_parts(removed, function(...) redis.call('ZREM', held_key, ...) end)
  if freed_tokens > 0 then
    add(owned_tokens_key, replica, -freed_tokens)
  end
  if unreadable > 0 then
    tell(replicas_key, 'held', replica, unreadable)
  end
  return #removed
end
