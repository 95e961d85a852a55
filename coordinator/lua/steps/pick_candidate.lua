-- The best of all candidates.
local names, is_desperate = candidates_of(subset, nominate, prompt_tokens - tokens_at(deepest), room_on)
if is_kept and is_desperate and pinned == '' and (room_on or #names > 0) then
  return { 'wait' } -- a try is better than a refusal, but this one may still wait
elseif #names == 0 then
  return string.find(line, '^hedge ') and { 'no_replica', now, 0 } or { 'none' }
end
local depth, held, top = walk(deepest, names, orders, not explain, start)
if orders then
  orders.add_owners(names, depth)
end
pick = picked(names, depth, held, top)
pick.is_desperate = is_desperate
