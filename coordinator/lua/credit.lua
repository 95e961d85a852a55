-- The engine said that it had cached more than the map knew: what it had is claimed in nobody's name, so that it does
-- not lapse for want of an event.
--
-- KEYS[1] replicas   KEYS[2] owned_tokens   KEYS[3] held:<replica>   KEYS[4..] own:<key>, shallow to deep
-- ARGV[1] replica   ARGV[2] incarnation   ARGV[3] reservation id of the request that was told
-- ARGV[4..] pairs: key (32 hex), span_tokens, in the order of KEYS[4..]
-- Returns the number of keys credited.

-- include time
-- include load

local incarnation, since_ms = life_of(KEYS[1], ARGV[1])
check_hashes(KEYS[2])
redis.call('ZCARD', KEYS[3])
if incarnation ~= ARGV[2] then
  return 0
end
local now_text = string.format('%d', math.max(now_ms(), tonumber(since_ms)))
local credited, added_tokens = 0, 0
for i = 4, #KEYS do
  local key, span = ARGV[2 * i - 4], ARGV[2 * i - 3]
  local record = field_of(KEYS[i], ARGV[1])
  local of, kind, by
  if record then
    of, kind, by = string.match(record, '^(%S+) (%S+) %S+ %S+ %S+ %S+ (%S+)')
  end
  if of ~= incarnation then
    local claim = incarnation .. ' claim gpu ' .. span .. ' 0 ' .. now_text .. ' -'
    write_counted(KEYS[2], '', KEYS[i], ARGV[1], claim)
    if record and of == nil then
      mark(KEYS[2], ARGV[1], 1)
    end
    redis.call('ZADD', KEYS[3], now_text, key)
    credited, added_tokens = credited + 1, added_tokens + tonumber(span)
  elseif kind == 'claim' and by == ARGV[3] then
    redis.call('HSET', KEYS[i], ARGV[1], string.match(record, '^%S+ %S+ %S+ %S+ %S+ %S+') .. ' -')
    credited = credited + 1
  end
end
if added_tokens > 0 then
  add(KEYS[2], ARGV[1], added_tokens)
end
return credited
