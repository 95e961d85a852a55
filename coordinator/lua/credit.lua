-- The engine had cached more of a prompt than the map knew. The keys are claimed without a reservation, so a missing
-- event does not end the claims.
--
-- KEYS
--   hash    replicas, owned_tokens
--   zset    held:<replica>
--   hash    own:<key>...: shallow to deep
-- ARGV
--   text    replica, incarnation
--   text    reservation: of the request whose answer told it
--   text    spans(key, span_tokens)...: in the order of own
-- Returns the number of keys credited.

-- include time
-- include load

local current, since_ms = life_of(replicas_key, replica)
check_hashes(owned_tokens_key)
redis.call('ZCARD', held_key)
if current ~= incarnation then
  return 0
end
local now_text = string.format('%d', math.max(now_ms(), tonumber(since_ms)))
local credited, added_tokens = 0, 0
for i = 1, #KEYS - OWN_OFFSET do
  local own_key, at = KEYS[OWN_OFFSET + i], SPANS_OFFSET + (i - 1) * SPANS_SIZE
  local key, span = ARGV[at + 1], ARGV[at + 2]
  local record = field_of(own_key, replica)
  local of, kind, by
  if record then
    of, kind, by = string.match(record, '^(%S+) (%S+) %S+ %S+ %S+ %S+ (%S+)')
  end
  if of ~= incarnation then
    local claim = incarnation .. ' claim gpu ' .. span .. ' 0 ' .. now_text .. ' -'
    write_counted('own', own_key, replica, claim)
    if record and of == nil then
      tell(own_key, 'own', replica)
    end
    redis.call('ZADD', held_key, now_text, key)
    credited, added_tokens = credited + 1, added_tokens + tonumber(span)
  elseif kind == 'claim' and by == reservation then
    redis.call('HSET', own_key, replica, string.match(record, '^%S+ %S+ %S+ %S+ %S+ %S+') .. ' -')
    credited = credited + 1
  end
end
if added_tokens > 0 then
  add(owned_tokens_key, replica, added_tokens)
end
return credited
