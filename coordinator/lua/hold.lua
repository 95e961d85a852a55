-- Records keys under the replica that owns them, by last use. A gateway calls it after a placement; `place` does not
-- write these records. Shallow keys count as used a little later than deep ones. So dropping the least recently used
-- never leaves a deep key without its prefix, as with an engine that evicts the tail of a prompt first. If the clock
-- went back since the replica was registered, its since_ms lies in the future. Then no use counts as earlier than
-- since_ms, or than the use before it.
--
-- KEYS
--   hash    replicas
--   zset    held:<replica>
-- ARGV
--   text    replica
--   text    keys...: shallow to deep
-- Returns the number of keys that were new.

-- include time
-- include load

local used_ms = now_ms()
local _, since_text = life_of(replicas_key, replica)
local since_ms = tonumber(since_text or 0)
if since_ms > used_ms then
  local newest = redis.pcall('ZRANGE', held_key, -1, -1, 'WITHSCORES')
  used_ms = math.max(since_ms, tonumber(newest[2] or 0) + 0.001)
end
local members, count = {}, #ARGV - KEYS_OFFSET
for i = 1, count do
  members[2 * i - 1] = string.format('%.3f', used_ms + (count - i) / 1000)
  members[2 * i] = ARGV[KEYS_OFFSET + i]
end
return (write('ZADD', held_key, unpack(members)))
