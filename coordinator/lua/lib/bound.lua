-- Writes a request's chain down, for the replica's agent and for the reaper. Two hashes, bound:0 and bound:1, take
-- turns of ttl_ms. The first writer of a turn empties the hash of two turns ago. The field "@" holds the number of the
-- turn. If a hash is of a later turn, the clock went back since it was written: it is kept and belongs to this turn
-- from now on.

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
