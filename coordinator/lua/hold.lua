-- Records keys under the replica that owns them, by last use: written behind a placement, never by it.
-- Shallow keys count as used a little later than deep ones: like an engine that evicts the tail of a prompt first,
-- whoever drops the least recently used never leaves a deep key without its prefix.
-- A replica that was registered before the clock went back has lived since a time to come: then no use counts as earlier
-- than that, or than the one before.
--
-- KEYS[1] replicas   KEYS[2] held:<replica>
-- ARGV[1] replica   ARGV[2..] keys (32 hex each), shallow to deep
-- Returns the number of keys that were new.

-- include time
-- include load

local used_ms = now_ms()
local _, since_text = life_of(KEYS[1], ARGV[1])
local since_ms = tonumber(since_text or 0)
if since_ms > used_ms then
  local newest = redis.pcall('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
  used_ms = math.max(since_ms, tonumber(newest[2] or 0) + 0.001)
end
local members = {}
for i = 2, #ARGV do
  members[2 * i - 3] = string.format('%.3f', used_ms + (#ARGV - i) / 1000)
  members[2 * i - 2] = ARGV[i]
end
return (write('ZADD', KEYS[2], unpack(members)))
