-- Looks after LMCache's chunks. A chunk without a TTL gets one. A chunk that was read lately and is in the second half
-- of its life gets a new life. No TTL is ever shortened. A chunk that nobody reads expires. Redis counts the setting of
-- a TTL as a use too. In the second half of the chunk's life, that use is too old to be "lately".
--
-- KEYS
--   string  chunks...
-- ARGV
--   number  ttl_ms: for chunks without a TTL
--   text    lives_ms...: the TTL with which each was written, in the order of chunks
-- Returns for each chunk "given" | "renewed" | "kept" | "gone", ttl_ms and bytes, flat.

local function is_read_lately(key, life_ms)
  local idle_s = redis.pcall('OBJECT', 'IDLETIME', key) -- an error under an LFU policy, which keeps no time of reads
  return type(idle_s) == 'number' and idle_s * 1000 < life_ms / 4
end

local function look_after(key, life_ms)
  local left_ms = redis.call('PTTL', key)
  if left_ms == -2 then
    return 'gone', 0
  elseif left_ms == -1 then
    redis.call('PEXPIRE', key, ttl_ms)
    return 'given', ttl_ms
  elseif left_ms < life_ms / 2 and is_read_lately(key, life_ms) then
    redis.call('PEXPIRE', key, life_ms)
    return 'renewed', life_ms
  end
  return 'kept', left_ms
end

local answer = {}
for i = 1, #KEYS - CHUNKS_OFFSET do
  local key = KEYS[CHUNKS_OFFSET + i]
  local outcome, left_ms = look_after(key, tonumber(ARGV[LIVES_MS_OFFSET + i]))
  answer[#answer + 1] = outcome
  answer[#answer + 1] = left_ms
  answer[#answer + 1] = redis.call('MEMORY', 'USAGE', key) or 0
end
return answer
