-- Records keys under the replica that owns them, by last use: written behind a placement, never by it.
-- Shallow keys count as used a little later than deep ones: like an engine that evicts the tail of a prompt first,
-- whoever drops the least recently used never leaves a deep key without its prefix.
--
-- KEYS[1] held:<replica>
-- ARGV[1..] keys (32 hex each), shallow to deep
-- Returns the number of keys that were new.

-- include time
-- include safe

local now = now_ms()
local members = {}
for i = 1, #ARGV do
  members[2 * i - 1] = string.format('%.3f', now + (#ARGV - i) / 1000)
  members[2 * i] = ARGV[i]
end
return (write('ZADD', KEYS[1], unpack(members)))
