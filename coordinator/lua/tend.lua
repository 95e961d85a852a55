-- Looks at chunks. One without a TTL is given one; one that was read lately and is in the second half of its life is
-- given a new life. No TTL ever gets shorter. An unread chunk expires: in the second half, setting its TTL (which Redis
-- takes for a use, like its SET) lies further back than "lately" reaches.
--
-- KEYS[1..] chunks
-- ARGV[1] ttl_ms for those without   ARGV[2..] life_ms: the TTL with which each was written, in the order of KEYS[1..]
-- Returns for each {"given" | "renewed" | "kept" | "gone", ttl_ms, bytes}, flat.

local function is_read_lately(key, life_ms)
  local idle_s = redis.pcall('OBJECT', 'IDLETIME', key) -- an error under an LFU policy: reads cannot be told then
  return type(idle_s) == 'number' and idle_s * 1000 < life_ms / 4
end

local function looked_at(key, life_ms)
  local ttl_ms = redis.call('PTTL', key)
  if ttl_ms == -2 then
    return 'gone', 0
  elseif ttl_ms == -1 then
    redis.call('PEXPIRE', key, ARGV[1])
    return 'given', tonumber(ARGV[1])
  elseif ttl_ms < life_ms / 2 and is_read_lately(key, life_ms) then
    redis.call('PEXPIRE', key, life_ms)
    return 'renewed', life_ms
  end
  return 'kept', ttl_ms
end

local answer = {}
for i = 1, #KEYS do
  local did, ttl_ms = looked_at(KEYS[i], tonumber(ARGV[i + 1]))
  answer[#answer + 1] = did
  answer[#answer + 1] = ttl_ms
  answer[#answer + 1] = redis.call('MEMORY', 'USAGE', KEYS[i]) or 0
end
return answer
