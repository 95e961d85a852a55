-- Two hashes take turns of ttl_ms: who writes first in a turn empties what was written two turns ago. Their field "@"
-- is the turn's number. A hash of a later turn is from before the clock went back: it is kept, and is of this turn from
-- now on.

-- include safe

local function write_down(bound_key, now, ttl_ms, tip, text)
  local turn = string.format('%d', math.floor(now / ttl_ms))
  local slot = bound_key .. ':' .. turn % 2
  local stands = field_of(slot, '@')
  if stands ~= turn then
    if (tonumber(stands or 0) or 0) < tonumber(turn) then
      redis.call('UNLINK', slot)
    end
    redis.call('HSET', slot, '@', turn)
  end
  redis.call('HSET', slot, tip, text)
end
