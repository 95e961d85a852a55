-- Changes a replica's state: who found it hanging, or working again, may be late.
--
-- KEYS[1] replicas
-- ARGV[1] replica   ARGV[2] incarnation   ARGV[3] the state that it was seen in   ARGV[4] its state from now on
-- Returns 1, or 0 where it lives another life or is in another state by now.

local record = redis.call('HGET', KEYS[1], ARGV[1]) or ''
local incarnation, state, rest = string.match(record, '^(%S+) (%S+) (.+)$')
if incarnation ~= ARGV[2] or state ~= ARGV[3] then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], table.concat({ incarnation, ARGV[4], rest }, ' '))
return 1
