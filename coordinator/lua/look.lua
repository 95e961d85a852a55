-- Tells how much replicas hold and when they used it, by which the worker decides which chores are due.
--
-- KEYS
--   hash    owned_tokens
--   zset    held:<replica>...
-- ARGV
--   text    replicas...: in the order of held
-- Returns for each replica: how many keys it holds, the last use of the key used least recently and of the one used
-- most recently (ms; "": it holds none), and its owned_tokens ("": none).

-- include safe

local told = {}
for i = 1, #KEYS - HELD_OFFSET do
  local held_key, at = KEYS[HELD_OFFSET + i], 4 * i
  local count = redis.pcall('ZCARD', held_key)
  told[at - 3], told[at - 2], told[at - 1] = 0, '', ''
  if type(count) == 'number' and count > 0 then -- a key of another type holds nothing
    told[at - 3] = count
    told[at - 2] = redis.call('ZRANGE', held_key, 0, 0, 'WITHSCORES')[2]
    told[at - 1] = redis.call('ZRANGE', held_key, -1, -1, 'WITHSCORES')[2]
  end
  told[at] = field_of(owned_tokens_key, ARGV[REPLICAS_OFFSET + i]) or ''
end
return told
