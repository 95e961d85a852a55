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
--   number  max_waiting, max_waiting_per_tenant: requests that wait, in the pool and of one tenant
--   number  tells_costs: 1: somebody watches, and wants to see what the candidates cost
-- KEYS
--   hash    replicas, breakers, active, backlog_tokens, owned_tokens, gateways, flight:<gateway>
--   string  turn
--   hash    bound: the base of bound:<slot>
--   hash    agents, reports, tiers, subsets, waiting, rates, speeds, tenants, budgets:<gateway>
--   zset    subset:<digest>: and the base of its orders
--   hash    own:<key>...: shallow to deep (the names of chunk:<key> are made from these)
-- ARGV
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
--             <ms that it can wait from now on; 0: any time> <ms after which its band goes first once>"
--   text    limits: of its tenant: "<concurrency> <requests_per_min> <tokens_per_min> <output tokens> <1 if the request
--             was let in before, else 0>", 0 where there is no limit; "": none
--   text    tokens...: behind each key, in the order of own
-- Returns {"ok", replica, incarnation, url, why, matched keys, matched tokens, claimed from (0: nothing claimed),
--          touch (1: the last use of the matched keys is due to be written), last_use_ms of the matched key,
--          backlog_tokens, kind of the matched record ("": none), its entry ("": a claim), now_ms,
--          mode (how the replica's agent learns chains; "": no agent),
--          report (1: ask the engine to report reused blocks),
--          stored keys and tokens that the replica can load beyond those matched (0, 0: none),
--          tokens that another candidate holds and the replica neither holds nor can load,
--          what is left of its tenant's limits (see budget.left in lib/limits.lua; "": it has none),
--          with `tells_costs` the candidates: a list of {replica, requests in flight, backlog, matched tokens, charged,
--          displaced, load, cost, speed if they are not equally fast} (see lib/costs.lua) as JSON, else ""},
--         {"stale"} (this gateway must reassert), {"undeclared"} (it must declare the subset: see declare),
--         {"none"} (no replica), {"late", now_ms} (the deadline is over), or with `explain` {"ok", JSON};
--         {"wait", since_ms, ms that it most likely waits (0: not known), a replica that has room ("": none)}: no replica
--         has room, or others wait that come first. It has a seat, and is granted later: see lib/grants.lua;
--         {"full" | "full_tenant" | "unreachable", now_ms, the same}: it has none, because too many wait, or it would wait
--         too long;
--         {"over_limit", now_ms, ms until it would be let in, "requests" | "tokens", what is left}: of its tenant's limits
-- A kept call returns {"wait"} if there is still no room, {"prefers"} if it still waits for a replica that holds more of
-- its prompt, {"blocked"} if its tenant has too many requests in flight.

local TOUCH_MS, HIT_SAMPLE, REPORT_MS, MIN_MATCH_TOKENS = 10000, 8, 100, 32
local BIND_TTL_MS = 60000 -- chains are kept for one to two of these: longer than a request waits for its first token
local MOST_PATIENT, LEAST_PATIENCE_MS = 8, 500

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

local budget = limits ~= '' and budget_of(budgets_key, tenants_key)
local asked = budget and budget.asked(limits, line)
if asked and not asked.is_admitted and not explain and not is_kept and not field_of(budgets_key, reservation) then
  local which, over_ms = budget.refusal(asked, now)
  if which then
    return { 'over_limit', now, over_ms, which, budget.left(asked, now) }
  end
end
local is_blocked = asked and budget.is_at_limit(asked)
if is_blocked and is_kept then
  return { 'blocked' }
end

math.randomseed(seed)

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

-- What the candidates cost: the fleet as in costs, the most keys that any of them has matched, what LMCache has stored,
-- and the hits of the prefix, as its most used owner counts them.
local function weigh(names, depth, held)
  local fleet, matched, best = load_of(subset, names), {}, 0
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
  local hits = 0
  for replica, record in pairs(held) do
    if best > 0 and depth[replica] == best then
      hits = math.max(hits, hits_of(record))
    end
  end
  if WEIGHS_CACHES or explain or tells_costs == 1 then
    prefix_costs(fleet, hits)
  end
  return fleet, best, stored_keys, stored_tokens, hits
end

-- A grant may know where room has come. Others most likely have none, and are not looked at.
local room_on = is_kept and pinned == '' and SETTINGS.room_on or nil
if room_on then
  subset.orders = nil
end

local deepest = deepest_existing(count, is_kept and SETTINGS.seen_uncached >= prompt_tokens)
local orders = WEIGHS_CACHES and subset.orders or nil
local names, desperate, depth, held, top = nil, false, {}, {}, deepest
local fleet, best_depth, stored_keys, stored_tokens, hits, limit, chosen

-- In a large fleet, one of a prompt's few owners is chosen at once if every other replica must cost more: the tokens that
-- it lacks alone do.
if orders and deepest > start and not has_tiers then
  local owners, others_reach = few_owners(deepest, start, not explain)
  names = owners and orders.good_owners(owners) or {}
  if #names > 0 then
    for replica, record in pairs(owners) do
      depth[replica], held[replica] = deepest, record
    end
    fleet, best_depth, stored_keys, stored_tokens, hits = weigh(names, depth, held)
    limit = guard_limit(fleet)
    chosen = choose(fleet, limit)
    local has_answer = answered > 0 and answered <= others_reach
    local reach = math.max(tokens_at(others_reach), has_answer and tokens_at(answer_end) or 0)
    if limit == math.huge or fleet.cost[chosen] > least_cost_elsewhere(fleet, reach, hits) then
      chosen = nil
    end
  end
end

if not chosen then
  local new_tokens = prompt_tokens - tokens_at(deepest)
  names, desperate = candidates_of(subset, nominate, new_tokens, room_on)
  if is_kept and desperate and pinned == '' and (room_on or #names > 0) then
    return { 'wait' } -- a try is better than a refusal, but this one may still wait
  elseif #names == 0 then
    return { 'none' }
  end
  depth, held, top = walk(deepest, names, orders, not explain, start)
  if orders then
    orders.add_owners(names, depth)
  end
  fleet, best_depth, stored_keys, stored_tokens, hits = weigh(names, depth, held)
  limit = guard_limit(fleet)
  chosen = choose(fleet, limit)
end

-- If the chosen replica has no room, the best of those that have. If none has, the request waits. It may also wait if those
-- hold less of its prompt than the one that has none: `full` is what that costs.
local best_held, must_wait, full = best_depth, false, nil
if is_kept and SETTINGS.takes_all_room then
  room_share = 1
end
if room_share > 0 and not desperate then
  if not has_room(names[chosen], fleet.active[chosen], fleet.backlog[chosen], room_share) then
    local roomy = with_room(fleet, room_share)
    if #roomy == 0 and subset.orders then
      local more = subset.orders.more_with_room(room_share)
      if #more > 0 then
        depth, held, top = walk(deepest, more, orders, not explain, start)
        roomy = with_room(load_of(subset, more), room_share)
      end
    end
    must_wait = #roomy == 0
    if not must_wait then
      if WEIGHS_CACHES and not is_kept and (depth[names[chosen]] or 0) == best_held then
        full = fleet.cost[chosen]
      end
      names = roomy
      fleet, best_depth, stored_keys, stored_tokens, hits = weigh(names, depth, held)
      limit = guard_limit(fleet)
      chosen = choose(fleet, limit)
    end
  end
end
if must_wait and is_kept then
  return { 'wait' }
end
if is_kept and now < SETTINGS.prefers_until_ms and (depth[names[chosen]] or 0) < best_held then
  return { 'prefers' }
end
must_wait = must_wait or is_blocked
full = (depth[names[chosen]] or 0) < best_held and full or nil
if room_on then -- others that own the chain were seen, but not weighed
  for _, deep in pairs(depth) do
    best_depth = math.max(best_depth, deep)
  end
  fleet.held_tokens = tokens_at(best_depth)
end

local replica = names[chosen]
local incarnation = string.sub(life_of_name[replica], 1, -2)
local matched = depth[replica] or 0
local matched_tokens, kind, entry = fleet.matched[chosen], '', ''
if matched > 0 then
  local by, exact
  kind, by, exact = string.match(held[replica], '^%S+ (%S+) %S+ %S+ %S+ %S+ (%S+) ?(%d*)')
  matched_tokens = tonumber(exact) or matched_tokens
  entry = kind == 'resident' and by or ''
end
if fleet.store_credit[chosen] == 0 or stored_tokens <= matched_tokens then
  stored_keys, stored_tokens = 0, 0
end
local why = stored_keys > 0 and 'stored' or 'cold'
if desperate then
  why = 'last_resort'
elseif pinned ~= '' then
  why = 'pinned'
elseif best_depth > 0 then
  why = matched == best_depth and 'hit' or (matched > 0 and 'partial_hit' or 'rebalanced')
end

local loaded = math.max(0, stored_tokens - matched_tokens) * fleet.store_credit[chosen]
local uncached = math.max(0, math.floor(prompt_tokens - matched_tokens - loaded))

-- Takes a seat, or is charged if others wait. A function, because Lua allows 200 local names in one. With `explain` it
-- returns why the request would wait (nil if it would not), and for how long.
local waits
local has_waiting = room_share > 0 and not is_kept and has_any and redis.call('EXISTS', waiting_key) == 1
if room_share > 0 and not is_kept and (must_wait or full or has_waiting) then
  local function take_turn()
-- include turns
    local base, queue = base_of(waiting_key), queue_of(digest, pinned, tried)
    local band, tenant, weight, output_tokens, since, wait_ms, starve_ms =
      string.match(line, '^(%d+) (%S+) (%S+) (%d+) (%d+) (%d+) (%d+)$')
    band = tonumber(band)
    local is_behind = has_waiting and not must_wait and somebody_waits(base, band, queue, replica, tenant)
    -- It waits for a replica that holds its prompt for as long as another one would compute what that one holds, times
    -- the requests that this would hold up there. Then any replica will do.
    local others_tokens, held_key = stored_tokens, best_held > 0 and string.sub(KEYS[OWN_OFFSET + best_held], -32) or '-'
    for i = 1, #names do
      local deep = depth[names[i]] or 0
      others_tokens = deep < best_held and math.max(others_tokens, tokens_at(deep)) or others_tokens
    end
    local more_tokens = WEIGHS_CACHES and tokens_at(best_held) - others_tokens or 0
    local rate = sum_of(field_of(rates_key, replica))
    local held_up = math.max(CHARGED_WEIGHT, fleet.active[chosen])
    local patience_ms = held_up * 1000 * more_tokens / (rate > 0 and rate or prefill_tokens_per_s)
    -- It waits for the full one, although others have room, if that costs less even with all who wait for the same key. But
    -- a short time is not worth it: most often a heartbeat sees that it is over.
    local prefers = false
    if full and not must_wait and patience_ms >= LEAST_PATIENCE_MS then
      local same = sum_of(field_of(base .. 'patient', held_key))
      prefers = same < MOST_PATIENT and full + same * REQUEST_COST_TOKENS < fleet.cost[chosen]
    end
    if explain and (must_wait or is_behind or prefers) then
      local refusal, expected_ms, ahead = refusal_of(base, band, queue, tenant, math.huge, is_blocked)
      return {
        why = is_blocked and 'concurrency' or prefers and 'prefers' or is_behind and 'others_wait' or 'no_room',
        refusal = not prefers and refusal or nil,
        ahead = ahead, expected_ms = expected_ms > 0 and expected_ms or cjson.null,
      }
    elseif explain then
      return nil
    end
    local since_ms = since == '0' and now or tonumber(since)
    local left_ms = wait_ms ~= '0' and tonumber(wait_ms) or math.huge
    local refusal, expected_ms = nil, 0
    if must_wait or is_behind or prefers then
      refusal, expected_ms = refusal_of(base, band, queue, tenant, left_ms, is_blocked)
    end
    if not must_wait and not is_behind and (not prefers or refusal) then
      if has_waiting then
        charge(base, gateway, reservation, band, tenant, tonumber(weight), uncached + tonumber(output_tokens), now)
        note_pace(base, queue, now)
      end
      return nil
    end
    if refusal and (since == '0' or refusal == 'unreachable') then -- who has waited before keeps its place
      return { refusal, now, expected_ms }
    end
    local is_patient = more_tokens > 0 and (must_wait or prefers or not full)
    take_seat(base, gateway, reservation, {
      band = band, tenant = tenant, weight = weight, tokens = uncached, output_tokens = output_tokens, queue = queue,
      since_ms = since_ms, starve_ms = tonumber(starve_ms), settings = all_settings(), keys = KEYS, argv = ARGV,
      key = is_patient and held_key or '-',
      until_ms = is_patient and now + math.floor(math.min(patience_ms, MOST_PATIENCE_MS)) or 0,
    }, now)
    if asked then
      budget.reserve(reservation, asked, uncached, now, false)
    end
    if is_blocked then
      park(base, band .. ' ' .. queue, tenant, now)
    end
    return { 'wait', since_ms, expected_ms, (must_wait or prefers) and '' or replica }
  end
  local answer = take_turn()
  if answer and not explain then
    return answer
  end
  waits = answer
end

if explain then
  local listed = {}
  for i = 1, #names do
    listed[i] = {
      replica = names[i], active = fleet.active[i], backlog_tokens = fleet.backlog[i],
      owned_tokens = fleet.owned[i], capacity_tokens = fleet.capacity[i], matched_keys = depth[names[i]] or 0,
      matched_tokens = fleet.matched[i], credit_tokens = fleet.credit[i], charged_tokens = fleet.terms.charged[i],
      displaced_tokens = fleet.terms.displaced[i], load_tokens = fleet.terms.load[i], cost = fleet.cost[i],
      cpu_credit = fleet.cpu_credit[i], store_credit = fleet.store_credit[i],
      guarded = fleet.guarded[i] >= limit, speed = fleet.speed and fleet.speed[i] or nil,
      has_room = room_share == 0 or has_room(names[i], fleet.active[i], fleet.backlog[i], room_share),
    }
  end
  return { 'ok', cjson.encode({
    policy = policy, replica = replica, incarnation = incarnation, why = why, matched_tokens = matched_tokens,
    prompt_tokens = prompt_tokens, stored_tokens = stored_tokens, shared_hits = hits, must_wait = waits ~= nil,
    waits = waits, limits = asked and budget.left(asked, now) or nil, replicas = listed,
  }) }
end

-- Claims every key deeper than those that the replica already owns. No key deeper than `top` exists.
local since_text, url = string.match(record_of[replica], '^%S+ %S+ %S+ (%S+) %S+ (%S+)')
local since_ms = tonumber(since_text)
local now_text = string.format('%d', math.max(now, since_ms))
local claimed_from, claimed_tokens = 0, 0
do
  local function is_claimable(key)
    local mine = field_of(key, replica)
    if mine and string.match(mine, '^%S+') == incarnation then
      if is_valid(mine, replica) then
        return false
      end
      -- This record is replaced.
      claimed_tokens = claimed_tokens - counted_span(mine, incarnation, since_ms, owned_tokens_key, replica)
    end
    return true
  end
  local head, tail = incarnation .. ' claim gpu ', ' 0 ' .. now_text .. ' ' .. reservation
  local behind, record, record_span = fleet.matched[chosen], '', nil
  for index = matched + 1, count do
    local key = KEYS[OWN_OFFSET + index]
    local span = tonumber(ARGV[TOKENS_OFFSET + index]) - behind
    local is_new = index > top
    if span ~= record_span then -- most keys add as much as the one before
      record, record_span = head .. span .. tail, span
    end
    if is_new or is_claimable(key) then
      if is_new then -- most often: so this is short
        redis.call('HSET', key, replica, record)
      else
        write_counted('own', key, replica, record)
      end
      claimed_tokens = claimed_tokens + span
      if claimed_from == 0 then
        claimed_from = index
      end
    end
    behind = behind + span
  end
end
if claimed_tokens ~= 0 then
  add(owned_tokens_key, replica, claimed_tokens)
end

-- Use of the matched key. Hits by other continuations are counted by sampling, and the last use is written at most once
-- per 10 s, so a warm prompt normally writes nothing here. After the clock went back, the last use lies in the future
-- and does not tell whether it is due: then it is written by sampling, too.
local touch, last_use = 0, 0
if matched > 0 then
  local head, uses, used, rest = string.match(held[replica], '^(%S+ %S+ %S+ %S+) (%d+) (%d+) (.+)')
  last_use = tonumber(used)
  local is_sampled = seed % HIT_SAMPLE == 0
  local counted = matched < count and is_sampled
  if now - last_use > TOUCH_MS or (last_use > now and is_sampled) then
    touch, used = 1, now_text
    if last_use < since_ms then -- claimed before this incarnation was registered: counted from now on
      add(owned_tokens_key, replica, tonumber(string.match(head, '^%S+ %S+ %S+ (%d+)$')))
    end
  end
  if counted then
    uses = tonumber(uses) + HIT_SAMPLE
  end
  if counted or touch == 1 then
    redis.call('HSET', KEYS[OWN_OFFSET + matched], replica, head .. ' ' .. uses .. ' ' .. used .. ' ' .. rest)
  end
end

-- The replica's agent counts if it is live and watches the current incarnation. While it relearns, requests whose prefix it may not know ask the engine to report it: not too many, and not while the
-- engine has requests waiting.
local mode, report = '', 0
do
  local agent_of, until_ms, agent_mode, relearning, waiting = string.match(
    field_of(agents_key, replica) or '', '^%S+ (%S+) (%d+) (%S+) (%d) (%d+)')
  local is_followed = agent_of == incarnation and agent_mode ~= 'none' and tonumber(until_ms) >= now
  if is_followed then
    mode = agent_mode
    if may_report and relearning == '1' and waiting == '0' and (claimed_from > 0 or kind == 'claim') then
      local asked_ms = tonumber(field_of(reports_key, replica) or 0) or 0
      if asked_ms > now or now - asked_ms >= REPORT_MS then
        report = 1
        write('HSET', reports_key, replica, string.format('%d', now))
      end
    end
  end
end

if claimed_from > 0 or report == 1 then
  local text = table.concat({ replica, incarnation, report, prompt_tokens, shape, chain }, ' ')
  write_down(bound_key, now, BIND_TTL_MS, tip, text)
end

if asked then
  budget.reserve(reservation, asked, uncached, now, true)
end
if is_kept then -- a grant goes on while there is room
  SETTINGS.has_more = has_room(replica, fleet.active[chosen] + 1, fleet.backlog[chosen] + uncached, room_share)
end
local costs = {}
for i = 1, tells_costs == 1 and #names or 0 do
  local terms = fleet.terms
  costs[i] = {
    names[i], fleet.active[i], fleet.backlog[i], fleet.matched[i], math.floor(terms.charged[i]),
    math.floor(terms.displaced[i]), math.floor(terms.load[i]), math.floor(fleet.cost[i]),
    fleet.speed and fleet.speed[i] or nil,
  }
end
local in_flight = table.concat({ replica, incarnation, since_text, uncached, tip }, ' ')
count_in(reservation, in_flight, flight_key, active_key, backlog_tokens_key)
local failures, open_until = string.match(breaker_of[replica] or '', '^(%d+) (%d+)')
if open_until and open_until ~= '0' then
  redis.call('HSET', breakers_key, replica, failures .. ' ' .. string.format('%d', now + probe_ms) .. ' 1')
  stand(base_of(replicas_key), replica, now, longest_open_ms)
end

return {
  'ok', replica, incarnation, url, why, matched, matched_tokens, claimed_from, touch, last_use, uncached, kind, entry,
  now, mode, report, stored_keys, stored_tokens,
  math.max(0, fleet.held_tokens - math.max(fleet.matched[chosen], stored_tokens)),
  asked and budget.left(asked, now) or '', tells_costs == 1 and cjson.encode(costs) or '',
}
