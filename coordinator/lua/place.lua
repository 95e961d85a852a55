-- Chooses a replica for a request, reserves its load there and claims the request's chain for it, in one atomic step:
-- so gateways cannot herd onto a replica that all of them just saw idle. With `explain` nothing is written, and every
-- candidate's cost is returned with its terms. A number that cannot be read counts as 0 for this decision, a replica
-- whose record cannot be read is no candidate, and an owner's record that cannot be read is dropped.
--
-- SETTINGS
--   text    policy: a file of policies/
--   number  max_active_requests: 0: no cap
--   number  probe_ms: how long a half-open breaker waits for its probe
--   number  max_wait_s: a replica has room while it computes what is ahead of a new prompt in less; 0: always
--   number  prefill_tokens_per_s: of a replica whose rate is not measured
--   number  max_waiting, max_waiting_per_tenant: queued requests, in the pool and of one tenant
--   number  tells_costs: 1: the answer is to say what the candidates cost
-- KEYS
--   hash    replicas, breakers, active, backlog_tokens, owned_tokens, gateways, flight:<gateway>
--   string  turn
--   hash    bound: the base of bound:<slot>
--   hash    agents, reports, tiers, subsets, waiting, rates, speeds, tenants, budgets:<gateway>, leased:<gateway>
--   zset    subset:<digest>: and the base of its orders
--   hash    own:<key>...: shallow to deep (the names of chunk:<key> are made from these)
-- ARGV
--   text    pair: of a request that may be placed at two replicas: see lib/pair.lua; "": it may not. Of the second
--             place: see steps/second.lua
--   text    gateway, epoch, reservation
--   flag    explain
--   number  deadline_ms: a call that runs later than this (Redis time) changes nothing; 0: none
--   number  seed
--   text    digest: of the replicas that serve the model
--   text    tried: replicas that failed already, space separated
--   text    release: the reservation of the failed attempt, to give back; "": none
--   text    pinned: the only replica allowed; "": any
--   text    order: the first replicas of the rendezvous order, space separated; for consistent_hash only
--   number  prompt_tokens
--   text    tip: "-" without a chain
--   text    chain: the keys of own, space separated
--   number  answered: how many keys come before the last answer in the prompt; 0: it has none
--   number  answer_end: how many keys come up to its end
--   text    shape: of the chain, for the agents: JSON
--   flag    may_report: the engine can be asked to report reused blocks
--   number  room_share: the part of a replica's room that the request may use (0..1); 0: it never waits for room
--   text    line: where it waits: "<band> <tenant> <weight> <output tokens, weighted> <since_ms; 0: now>
--             <ms that it can wait from now on; 0: any time> <ms after which its band goes first once>"; or "hedge …" of
--             a second attempt: see steps/hedge.lua
--   text    limits: of its accounts (see lib/limits.lua): "<output tokens> <1 if the request was let in before, else 0>",
--             and for each " / <account> <concurrency> <requests_per_min> <tokens_per_min>", 0 where there is no limit;
--             "": none
--   text    bill: what it can cost (see lib/spending.lua): nanos that are certain, output tokens, nanos per million tokens:
--             uncached, cached, output; output tokens per s at most; for each budget " / <budget> <limit>"; "": it has none
--   flag    covered: slices of its gateway hold that already, unless it waits for room (see spending.slice there)
--   text    tokens...: behind each key, in the order of own
-- Returns {"ok", replica, incarnation, url, why, matched keys, matched tokens, claimed from (0: nothing claimed),
--          touch (1: the last use of the matched keys is due to be written), last_use_ms of the matched key,
--          backlog_tokens, kind of the matched record ("": none), its entry ("": a claim), now_ms,
--          mode (how the replica's agent learns chains; "": no agent),
--          report (1: ask the engine to report reused blocks),
--          stored keys and tokens that the replica can load beyond those matched (0, 0: none),
--          tokens that another candidate holds and the replica neither holds nor can load,
--          what is left of its accounts' limits (see budget.left in lib/limits.lua; "": it has none),
--          with `tells_costs` the candidates: lists of their names, requests in flight, backlogs, matched tokens, charged,
--          displaced, load, costs, and speeds if they are not equally fast (see lib/costs.lua), else "",
--          what is spent of its budgets (see spending.weigh in lib/spending.lua; "": it has none, or is covered),
--          the backlog of the replica before this request},
--         {"stale"} (this gateway must reassert), {"undeclared"} (it must declare the subset: see declare),
--         {"none"} (no replica), {"late", now_ms} (the deadline is over), or with `explain` {"ok", JSON};
--         {"wait", since_ms, ms that it most likely waits (0: not known), a replica that has room ("": none)}: no replica
--         has room, or others wait that come first. It has a seat, and is granted later: see lib/grants.lua;
--         {"full" | "full_tenant" | "unreachable", now_ms, the same}: it has none, because too many wait, or it would wait
--         too long;
--         {"over_limit", now_ms, ms until it would be let in, "requests" | "tokens", what is left, which of its accounts
--         (from 1)}: of a limit of this account;
--         {"over_budget", now_ms, what is spent of its budgets, backlog_tokens}: it may cost more than is left;
--         {"no_replica" | "no_room" | "later" | "withheld", now_ms, 0}: of a second attempt, which is not made, or not yet;
--         "no_room" also of the second place of a pair
-- A kept call returns {"wait"} if there is still no room, {"prefers"} if it still waits for a replica that holds more of
-- its prompt, {"blocked", account} if this account of its has too many requests in flight.

-- include time

-- First of all, so that a late call costs next to nothing: an overloaded Redis has to refuse many.
local now = is_kept and SETTINGS.now or now_ms()
if is_kept and SETTINGS.layout ~= LAYOUT then
  return { 'lost' } -- another version kept it: its gateway places it again
end
if deadline_ms > 0 and now > deadline_ms and not is_kept then
  return { 'late', now }
end

-- Most often there are none of these: one call tells. A kept call is one that waits.
local has_any = redis.call('EXISTS', tiers_key, breakers_key, speeds_key, is_kept and tiers_key or waiting_key) > 0

-- include load
-- include owned
-- include costs
-- include room
-- include candidates
-- include chain
-- include tiers

local has_tiers = has_any and redis.pcall('HLEN', tiers_key) ~= 0 -- policies see it

local WEIGHS_CACHES, nominate, choose
-- include policies/<policy>
-- include bound
-- include limits
-- include spending

if not explain and not is_kept then
  local lease = redis.call('HGET', gateways_key, gateway)
  if not lease or string.match(lease, '^%d+') ~= epoch then
    return { 'stale' }
  end
end
local subset = subset_of(digest)
if not subset then
  return { 'undeclared' }
end
if release ~= '' and not explain and not is_kept then
  local entry = field_of(flight_key, release)
  if entry then
    redis.call('HDEL', flight_key, release)
    give_back(entry, replicas_key, active_key, backlog_tokens_key)
  end
  budget_of(budgets_key, tenants_key).move(release, reservation)
end
local billed = bill ~= '' and (is_kept or not covered) and spending_of(tenants_key, leased_key)
if billed and release ~= '' and not explain then -- else the settlement that follows frees it
  billed.free(release)
end

local budget = limits ~= '' and budget_of(budgets_key, tenants_key)
local asked = budget and budget.asked(limits)
if asked and not asked.is_admitted and not explain and not is_kept and not field_of(budgets_key, reservation) then
  local of, which, over_ms = budget.refusal(asked, now)
  if of then
    return { 'over_limit', now, over_ms, which, budget.left(asked, now), of }
  end
end
local blocked_by = asked and budget.at_limit(asked)
if blocked_by and is_kept then
  return { 'blocked', blocked_by }
end

math.randomseed(seed)

-- A grant may know where room has come. Others most likely have none, and are not looked at.
local room_on = is_kept and pinned == '' and SETTINGS.room_on or nil
if room_on then
  subset.orders = nil
end
-- include steps/weigh

local pick
if orders and deepest > start and not has_tiers then
-- include steps/pick_owner
end
if not pick then
-- include steps/pick_candidate
end

local best_held, must_wait, full = pick.best_depth, false, nil
if is_kept and SETTINGS.takes_all_room then
  room_share = 1
end
if room_share > 0 and not pick.is_desperate then
  local at, fleet = pick.at, pick.fleet
  if not has_room(pick.names[at], fleet.active[at], fleet.backlog[at], room_share) then
-- include steps/pick_with_room
  end
end
local fleet, chosen = pick.fleet, pick.at
local replica = pick.names[chosen]
local matched = pick.depth[replica] or 0
if must_wait and is_kept then
  return { 'wait' }
end
if is_kept and now < SETTINGS.prefers_until_ms and matched < best_held then
  return { 'prefers' }
end
must_wait = must_wait or blocked_by
if room_on then -- others that own the chain were seen, but not weighed
  for _, deep in pairs(pick.depth) do
    pick.best_depth = math.max(pick.best_depth, deep)
  end
  fleet.held_tokens = tokens_at(pick.best_depth)
end

local incarnation = string.sub(life_of_name[replica], 1, -2)
local matched_tokens, kind, entry = fleet.matched[chosen], '', ''
if matched > 0 then
  local by, exact
  kind, by, exact = string.match(pick.held[replica], '^%S+ (%S+) %S+ %S+ %S+ %S+ (%S+) ?(%d*)')
  matched_tokens = tonumber(exact) or matched_tokens
  entry = kind == 'resident' and by or ''
end
if fleet.store_credit[chosen] == 0 or pick.stored_tokens <= matched_tokens then
  pick.stored_keys, pick.stored_tokens = 0, 0
end
local stored_tokens = pick.stored_tokens
local why = pick.stored_keys > 0 and 'stored' or 'cold'
if pick.is_desperate then
  why = 'last_resort'
elseif pinned ~= '' then
  why = 'pinned'
elseif pick.best_depth > 0 then
  why = matched == pick.best_depth and 'hit' or (matched > 0 and 'partial_hit' or 'rebalanced')
end

local uncached
do -- for a function has 200 locals at most
  local loaded = math.max(0, stored_tokens - matched_tokens) * fleet.store_credit[chosen]
  uncached = math.max(0, math.floor(prompt_tokens - matched_tokens - loaded))
end

local taken, spent_text = nil, ''
if billed and not explain then
  local is_over
  taken, is_over, spent_text = billed.weigh(bill, uncached, prompt_tokens - uncached)
  if is_over then
    return { 'over_budget', now, spent_text, uncached }
  end
end

local is_second = string.find(pair, '^%d') ~= nil
if string.find(line, '^hedge ') then
-- include steps/hedge
elseif is_second then
-- include steps/second
end

local waits
local has_waiting = room_share > 0 and not is_kept and has_any and redis.call('EXISTS', waiting_key) == 1
if room_share > 0 and not is_kept and not is_second and (must_wait or full or has_waiting) then
-- include steps/turn
  waits = take_turn()
  if waits and not explain then
    return waits
  end
end

if explain then
-- include steps/explain
end

-- The request goes to this replica.
local since_text, url = string.match(record_of[replica], '^%S+ %S+ %S+ (%S+) %S+ (%S+)')
local since_ms = tonumber(since_text)
local now_text = string.format('%d', math.max(now, since_ms))
local claimed_from, touch, last_use, mode, report, costs = 0, 0, 0, '', 0, ''
do
-- include steps/claim
end
if matched > 0 then
-- include steps/note_use
end
do
-- include steps/follow
end
if tells_costs == 1 then
-- include steps/costs
end
if asked then
  budget.reserve(reservation, asked, uncached, now, true)
end
if billed then
  billed.lease(reservation, taken, now)
end
if is_kept then -- a grant goes on while there is room
  SETTINGS.has_more = has_room(replica, fleet.active[chosen] + 1, fleet.backlog[chosen] + uncached, room_share)
end
do -- as above
  local in_flight = table.concat({ replica, incarnation, since_text, uncached, tip }, ' ')
  count_in(reservation, in_flight, flight_key, active_key, backlog_tokens_key)
  local first = is_second and string.match(pair, '%S+$') -- its prompt is computed here
  local first_entry = first and field_of(flight_key, first)
  if first_entry then
    end_backlog(first, first_entry, flight_key, replicas_key, active_key, backlog_tokens_key)
  end
  local failures, open_until = string.match(breaker_of[replica] or '', '^(%d+) (%d+)')
  if open_until and open_until ~= '0' then
    redis.call('HSET', breakers_key, replica, failures .. ' ' .. string.format('%d', now + probe_ms) .. ' 1')
    stand(base_of(replicas_key), replica, now, longest_open_ms)
  end
end

return {
  'ok', replica, incarnation, url, why, matched, matched_tokens, claimed_from, touch, last_use, uncached, kind, entry,
  now, mode, report, pick.stored_keys, stored_tokens,
  math.max(0, fleet.held_tokens - math.max(fleet.matched[chosen], stored_tokens)),
  asked and budget.left(asked, now) or '', costs, spent_text, fleet.backlog[chosen],
}
