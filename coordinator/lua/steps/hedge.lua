-- A second attempt of a request whose first replica is late (a hedge). `line` is "hedge <max_share> <tokens>": it comes
-- earlier only if its replica computes no more than so many tokens until then. It never waits, never takes a breaker's
-- probe, and nobody gets one while requests wait for room.
-- include allowance
local max_share, within_tokens = string.match(line, '^hedge (%S+) (%d+)$')
local open_until = string.match(breaker_of[replica] or '', '^%d+ (%d+)') or '0'
if room_share == 0 or must_wait or pick.is_desperate or open_until ~= '0' or (has_any and redis.call('EXISTS', waiting_key) == 1) then
  return { 'no_room', now, 0 }
elseif fleet.backlog[chosen] + uncached > tonumber(within_tokens) then
  return { 'later', now, 0 }
elseif not allow(base_of(waiting_key) .. 'hedges', 0, math.max(1, uncached), tonumber(max_share), now) then
  return { 'withheld', now, 0 }
end
