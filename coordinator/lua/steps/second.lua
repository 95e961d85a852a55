-- The second place of a pair, where the prompt is computed. It never waits. `pair` is "<tokens> <first replica> <first
-- reservation>": this one is taken only if it has computed the prompt before the first replica would have computed so many
-- tokens. If the speed of one is not measured, it counts as that of the other.
local most_tokens, first = string.match(pair, '^(%d+) (%S+)')
local rates = redis.pcall('HMGET', rates_key, replica, first)
local rate, first_rate = sum_of(rates[1]), sum_of(rates[2])
local times_as_fast = rate > 0 and first_rate > 0 and rate / first_rate or 1
if pick.is_desperate then
  return { 'none' }
elseif must_wait or fleet.backlog[chosen] + uncached > most_tokens * times_as_fast then
  return { 'no_room', now, 0 }
end
