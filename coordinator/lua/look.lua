-- Tells how much replicas hold and when they used it, by which the worker decides which tasks are due.
--
-- KEYS
--   hash    owned_tokens, active
--   zset    held:<replica>...
-- ARGV
--   text    replicas...: in the order of held
-- Returns for each replica: how many keys it holds, the last use of the key used least recently and of the one used
-- most recently (ms; "": it holds none), its owned_tokens ("": none), and its requests in flight.

-- include safe

local told = {}
for i = 1, #KEYS - HELD_OFFSET do
  local held_key, at = KEYS[HELD_OFFSET + i], 5 * i
  local count = redis.pcall('ZCARD', held_key)
  told[at - 4], told[at - 3], told[at - 2] = 0, '', ''
  if type(count) == 'number' and count > 0 then -- a key of another type holds nothing
    told[at - 4] = count
    told[at - 3] = redis.call('ZRANGE', held_key, 0, 0, 'WITHSCORES')[2]
    told[at - 2] = redis.call('ZRANGE', held_key, -1, -1, 'WITHSCORES')[2]
  end
  local replica = ARGV[REPLICAS_OFFSET + i]
  told[at - 1], told[at] = field_of(owned_tokens_key, replica) or '', sum_of(field_of(active_key, replica))
end
return told
