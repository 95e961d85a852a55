-- Records keys under the replica that owns them, by last use. A gateway calls it after a placement; `place` does not
-- write these records. Shallow keys count as used a little later than deep ones. So dropping the least recently used
-- never leaves a deep key without its prefix, as with an engine that evicts the tail of a prompt first. If the clock
-- went back, the last uses, and the replica's since_ms, lie in the future. Then no use counts as earlier than since_ms, or
-- than the use before it: so the order of uses stays right.
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

local AHEAD_MS = 1000 -- shallow keys are ahead by less

local used_ms = now_ms()
local _, since_text = life_of(replicas_key, replica)
local since_ms, newest = tonumber(since_text or 0), redis.pcall('ZRANGE', held_key, -1, -1, 'WITHSCORES')
local newest_ms = sum_of(newest[2])
if since_ms > used_ms or newest_ms > used_ms + AHEAD_MS then
  used_ms = math.max(since_ms, newest_ms + 0.001)
end
local members, count = {}, #ARGV - KEYS_OFFSET
for i = 1, count do
  members[2 * i - 1] = string.format('%.3f', used_ms + (count - i) / 1000)
  members[2 * i] = ARGV[KEYS_OFFSET + i]
end
return (write('ZADD', held_key, unpack(members)))
