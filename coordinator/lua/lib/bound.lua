-- Two hashes take turns of ttl_ms: who writes first in a turn empties what was written two turns ago. Their field "@" is
-- the turn's number.

-- include safe

local function write_down(bound_key, now, ttl_ms, tip, text)
  local turn = string.format('%d', math.floor(now / ttl_ms))
  local slot = bound_key .. ':' .. turn % 2
  if field_of(slot, '@') ~= turn then
    redis.call('UNLINK', slot)
    redis.call('HSET', slot, '@', turn)
  end
  redis.call('HSET', slot, tip, text)
end
