-- The allowance for hedges: at most `max_share` of the prompt tokens that all gateways place for computing are computed a
-- second time, because the first replica was late.
--   hedges   "placed", "hedged": tokens, "at_ms"
-- Both sums fade in the same way. So a long time without hedges saves nothing up for later, and in all no more than that
-- share is ever spent.

-- include safe

-- Counts what was placed, and what is wanted (0: nothing). Whether that is allowed.
local function allow(hedges_key, placed_tokens, wanted_tokens, max_share, now)
  local FADES_MS, LIVES_S = 60000, 600
  local found = redis.pcall('HMGET', hedges_key, 'placed', 'hedged', 'at_ms')
  local faded = math.exp((math.min(now, sum_of(found[3])) - now) / FADES_MS)
  local placed, hedged = sum_of(found[1]) * faded + placed_tokens, sum_of(found[2]) * faded
  local is_allowed = wanted_tokens > 0 and hedged + wanted_tokens <= max_share * placed
  if is_allowed then
    hedged = hedged + wanted_tokens
  end
  write('HSET', hedges_key, 'placed', string.format('%.3f', placed), 'hedged', string.format('%.3f', hedged),
    'at_ms', string.format('%d', now))
  redis.call('EXPIRE', hedges_key, LIVES_S)
  return is_allowed
end
