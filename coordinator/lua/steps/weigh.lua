-- A pick: replicas that may serve the request, what each holds of its prompt, what each costs, and the one chosen.
--   names, fleet       the replicas, and their load and costs as parallel arrays (see costs)
--   depth, held        by replica: how many keys of the chain it owns, and the record of the deepest
--   top                no key deeper than this exists
--   best_depth         the most keys that any of them owns
--   hits               of the prefix, as its most used owner counts them
--   stored_keys, stored_tokens   what LMCache has stored
--   limit, at          the load guard's limit, and the index of the chosen one

local HIT_SAMPLE, MIN_MATCH_TOKENS = 8, 32

local count = #KEYS - OWN_OFFSET
local function tokens_at(index)
  return index > 0 and tonumber(ARGV[TOKENS_OFFSET + index]) or 0
end

local start = 1
while start < count and tokens_at(start) < MIN_MATCH_TOKENS do
  start = start + 1
end

local function hits_of(record)
  return tonumber(string.match(record, '^%S+ %S+ %S+ %S+ (%d+)'))
end

-- The tokens that each candidate most likely holds. Who owns the chain up to the last answer has most likely made this
-- answer: no key tells, because keys are made of prompts. If others go on after the prompt before it, too, they may have
-- brought answers of their own, so nobody gets credit for having made one.
local function with_answer(matched, names, depth, held)
  local likely = {}
  for i = 1, #names do
    local deep, is_likely = depth[names[i]] or 0, false
    if deep >= answered and deep < answer_end then
      is_likely = hits_of(held[names[i]]) <= HIT_SAMPLE
    end
    likely[i] = is_likely and tokens_at(answer_end) or matched[i]
  end
  return likely
end

-- The pick among these.
local function picked(names, depth, held, top)
  local fleet, matched, best, hits = load_of(subset, names), {}, 0, 0
  for i = 1, fleet.count do
    local deep = depth[names[i]] or 0
    matched[i] = tokens_at(deep)
    if deep > best then
      best = deep
    end
  end
  fleet.matched, fleet.held_tokens = matched, tokens_at(best)
  fleet.likely = answered > 0 and with_answer(matched, names, depth, held) or matched
  local stored_keys, stored_tokens = weigh_tiers(fleet, held, count, has_tiers)
  for replica, record in pairs(held) do
    if best > 0 and depth[replica] == best then
      hits = math.max(hits, hits_of(record))
    end
  end
  if WEIGHS_CACHES or explain or tells_costs == 1 then
    prefix_costs(fleet, hits)
  end
  local limit = guard_limit(fleet)
  return {
    names = names, fleet = fleet, depth = depth, held = held, top = top, best_depth = best, hits = hits,
    stored_keys = stored_keys, stored_tokens = stored_tokens, limit = limit, at = choose(fleet, limit),
  }
end

local deepest = deepest_existing(count, is_kept and SETTINGS.seen_uncached >= prompt_tokens)
local orders = WEIGHS_CACHES and subset.orders or nil
