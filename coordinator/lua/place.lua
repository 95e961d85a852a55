-- Chooses a replica for a request, reserves its load there and claims the request's chain for it: one atomic
-- step, so gateways cannot herd onto the replica that all of them just saw idle. In mode "explain" nothing is
-- written, and every candidate's cost comes back with its terms. A number that cannot be read counts as 0 for this one
-- decision, a replica whose record cannot be read is no candidate, and an owner's record that cannot be read is dropped.
--
-- KEYS[1] replicas   KEYS[2] breakers   KEYS[3] active   KEYS[4] backlog_tokens   KEYS[5] owned_tokens
-- KEYS[6] gateways   KEYS[7] flight:<gateway>   KEYS[8] turn   KEYS[9] bound   KEYS[10] agents   KEYS[11] reports
-- KEYS[12] leases   KEYS[13] tiers   KEYS[14..] own:<key>, shallow to deep (chunk:<key> and bound:<slot> are spelled from these)
-- ARGV[1] gateway   ARGV[2] epoch   ARGV[3] reservation id   ARGV[4] "place" | "explain"   ARGV[5] policy
-- ARGV[6] seed   ARGV[7] replicas tried (space separated)   ARGV[8] id of the failed attempt to give back ("": none)
-- ARGV[9] the only replica allowed ("": any)   ARGV[10] rendezvous order (space separated; consistent_hash only)
-- ARGV[11] prompt_tokens   ARGV[12] min_slack_requests   ARGV[13] load_factor   ARGV[14] request_cost_tokens
-- ARGV[15] copy_weight   ARGV[16] max_owners   ARGV[17] max_active_requests (0: no cap)
-- ARGV[18] probe_ms: how long a half-open breaker waits for its probe   ARGV[19] bind_ttl_ms: chains are kept for one to two of these
-- ARGV[20] the replicas that serve the model (space separated; "": all of the pool)
-- ARGV[21] the tip (32 hex; "-" without a chain)   ARGV[22] cpu_credit: what a token in CPU memory is worth (0..1)
-- ARGV[23] the chain's shape, for the agents: JSON   ARGV[24] "1": the engine can be asked to report reused blocks
-- ARGV[25] store_credit: what a token in LMCache's Redis tier is worth (0..1); both hold until they are measured
-- ARGV[26..] tokens behind each key, in the order of KEYS[14..]
-- Returns {"ok", replica, incarnation, url, why, matched keys, matched tokens, claimed from (0: nothing claimed),
--          touch (1: the matched keys' last use is due), last_use_ms of the matched key, backlog_tokens,
--          the matched record's kind ("": none), its entry ("": a claim), now_ms,
--          mode (how the replica's agent learns chains; "": no agent), report (1: ask the engine to report reused blocks),
--          stored keys and tokens that the replica can load beyond those matched (0, 0: none),
--          tokens that another candidate holds and the replica neither holds nor can load},
--         {"stale"} (this gateway must reassert), {"none"} (no replica), or in explain {"ok", JSON}

local FIRST_OWN, FIRST_TOKENS, TOUCH_MS, HIT_SAMPLE, REPORT_MS, MIN_MATCH_TOKENS = 14, 26, 10000, 8, 100, 32
local MAX_OPENINGS = 12 -- a breaker stays open for so many times probe_ms at most: what is said to last longer is over

-- include time
-- include tables
-- include load
-- include owned
-- include chain
-- include tiers
-- include choose
-- include bound

local explain = ARGV[4] == 'explain'
if not explain then
  local lease = redis.call('HGET', KEYS[6], ARGV[1])
  if not lease or string.match(lease, '^%d+') ~= ARGV[2] then
    return { 'stale' }
  end
  if ARGV[8] ~= '' then
    local entry = field_of(KEYS[7], ARGV[8])
    if entry then
      redis.call('HDEL', KEYS[7], ARGV[8])
      give_back(entry, KEYS[1], KEYS[3], KEYS[4])
    end
  end
end

local now = now_ms()
local seed = tonumber(ARGV[6])
math.randomseed(seed)

-- The candidates: ready and not broken; failing that, ready with an open breaker; failing that, dead (better a try
-- than a refusal). Never one that was tried.
local records, breakers = redis.call('HGETALL', KEYS[1]), pairs_of(KEYS[2])
local lives, capacities, record_of = {}, {}, {}
local latest_open_ms = now + MAX_OPENINGS * tonumber(ARGV[18])
local good, broken, dead = {}, {}, {}
local tried, serving = set_of(ARGV[7]), set_of(ARGV[20])
for i = 1, #records, 2 do
  local replica = records[i]
  local incarnation, state, capacity, floor = string.match(records[i + 1], '^(%S+) (%S+) (%d+) %d+ (%d+) %S')
  lives[replica], capacities[replica] = incarnation ~= nil and { incarnation, tonumber(floor) }, tonumber(capacity)
  record_of[replica] = records[i + 1]
  local serves = incarnation and (ARGV[20] == '' or serving[replica])
  if serves and (ARGV[9] == '' or ARGV[9] == replica) and not tried[replica] then
    local open_until = breakers[replica] and tonumber(string.match(breakers[replica], '^%d+ (%d+)')) or 0
    local tier = state ~= 'ready' and dead or (open_until > now and open_until <= latest_open_ms and broken or good)
    tier[#tier + 1] = replica
  end
end
local desperate = #good == 0
local names = desperate and (#broken > 0 and broken or dead) or good
if #names == 0 then
  return { 'none' }
end

local count = #KEYS - FIRST_OWN + 1
local prompt_tokens = tonumber(ARGV[11])
local function tokens_at(index)
  return index > 0 and tonumber(ARGV[FIRST_TOKENS + index - 1]) or 0
end

local start = 1
while start < count and tokens_at(start) < MIN_MATCH_TOKENS do
  start = start + 1
end
local depth, held, top = walk(count, lives, not explain, start)

local active, backlog, owned = pairs_of(KEYS[3]), pairs_of(KEYS[4]), pairs_of(KEYS[5])
local fleet = {
  count = #names, name = names, active = {}, backlog = {}, owned = {}, capacity = {}, matched = {}, credit = {},
  cpu_credit = {}, store_credit = {}, held_tokens = 0,
}
if ARGV[5] == 'round_robin' then
  table.sort(names)
end
local best_depth = 0
for i = 1, #names do
  local replica = names[i]
  fleet.active[i] = sum_of(active[replica])
  fleet.backlog[i] = sum_of(backlog[replica])
  fleet.owned[i] = sum_of(owned[replica])
  fleet.capacity[i] = capacities[replica]
  fleet.matched[i] = tokens_at(depth[replica] or 0)
  if (depth[replica] or 0) > best_depth then
    best_depth = depth[replica]
  end
end
fleet.held_tokens = tokens_at(best_depth)
local stored_keys, stored_tokens =
  weigh_tiers(fleet, held, KEYS[13], prompt_tokens, count, tonumber(ARGV[22]), tonumber(ARGV[25]))

-- Of a prefix, the hits that its best-used owner counts.
local hits = 0
for replica, record in pairs(held) do
  if best_depth > 0 and depth[replica] == best_depth then
    hits = math.max(hits, tonumber(string.match(record, '^%S+ %S+ %S+ %S+ (%d+)')))
  end
end

local policy = ARGV[5]
local knobs = {
  min_slack = tonumber(ARGV[12]), load_factor = tonumber(ARGV[13]), request_cost_tokens = tonumber(ARGV[14]),
  copy_weight = tonumber(ARGV[15]), max_active = tonumber(ARGV[17]),
}
local limit = guard_limit(fleet, knobs)
local occupied = occupied_tokens(fleet)
local cost, charged, displaced, load
local chosen
if policy == 'prefix_kv_aware' or explain then
  cost, charged, displaced, load = prefix_costs(fleet, occupied, prompt_tokens, hits, knobs)
end
if policy == 'prefix_kv_aware' then
  chosen = least(fleet, limit, cost, occupied)
elseif policy == 'round_robin' then
  local turn = redis.pcall(explain and 'GET' or 'INCR', KEYS[8]) or 0
  turn = (type(turn) ~= 'table' and tonumber(turn) or seed) + (explain and 1 or 0) -- an error where it cannot be read
  chosen = (turn - 1) % fleet.count + 1
elseif policy == 'random' then
  chosen = math.random(fleet.count)
elseif policy == 'least_loaded' then
  chosen = least(fleet, math.huge, fleet.active, fleet.backlog)
elseif policy == 'power_of_two' then
  chosen = power_of_two(fleet)
else
  chosen = first_in_order(fleet, ARGV[10], limit)
end

local replica = names[chosen]
local incarnation = lives[replica][1]
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
elseif ARGV[9] ~= '' then
  why = 'pinned'
elseif best_depth > 0 then
  why = matched == best_depth and 'hit' or (matched > 0 and 'partial_hit' or 'rebalanced')
end

if explain then
  local listed = {}
  for i = 1, #names do
    listed[i] = {
      replica = names[i], active = fleet.active[i], backlog_tokens = fleet.backlog[i],
      owned_tokens = fleet.owned[i], capacity_tokens = fleet.capacity[i], matched_keys = depth[names[i]] or 0,
      matched_tokens = fleet.matched[i], credit_tokens = fleet.credit[i], charged_tokens = charged[i],
      displaced_tokens = displaced[i], load_tokens = load[i], cost = cost[i],
      cpu_credit = fleet.cpu_credit[i], store_credit = fleet.store_credit[i],
      guarded = fleet.active[i] >= limit,
    }
  end
  return { 'ok', cjson.encode({
    policy = policy, replica = replica, incarnation = incarnation, why = why, matched_tokens = matched_tokens,
    prompt_tokens = prompt_tokens, stored_tokens = stored_tokens, shared_hits = hits, replicas = listed,
  }) }
end

-- The claims: every key deeper than what the replica already owns. Above `top` no key exists, so the cap on
-- owners is only asked below it. A copy of a full key is not recorded: its credit is lost, nothing else.
local since_text, url = string.match(record_of[replica], '^%S+ %S+ %S+ (%S+) %S+ (%S+)')
local since_ms = tonumber(since_text)
local now_text = string.format('%d', math.max(now, since_ms))
local claimed_from, claimed_tokens = 0, 0
local function is_claimable(key)
  local mine = field_of(key, replica)
  if mine and string.match(mine, '^%S+') == incarnation then
    if holds(mine, lives[replica]) then
      return false
    end
    claimed_tokens = claimed_tokens - counted_span(mine, incarnation, since_ms, KEYS[5], replica) -- it is replaced
    return true
  end
  local owners = mine and 0 or redis.pcall('HLEN', key)
  return type(owners) == 'table' or owners < tonumber(ARGV[16])
end
local head, tail = incarnation .. ' claim gpu ', ' 0 ' .. now_text .. ' ' .. ARGV[3]
local behind = fleet.matched[chosen]
for index = matched + 1, count do
  local key = KEYS[FIRST_OWN + index - 1]
  local span = tonumber(ARGV[FIRST_TOKENS + index - 1]) - behind
  if index > top or is_claimable(key) then
    write_counted(KEYS[5], '', key, replica, head .. span .. tail)
    claimed_tokens = claimed_tokens + span
    if claimed_from == 0 then
      claimed_from = index
    end
  end
  behind = behind + span
end
if claimed_tokens ~= 0 then
  add(KEYS[5], replica, claimed_tokens)
end

-- Use of the matched key: hits by other continuations are counted by sampling, the last use at most once per 10 s,
-- so that the steady state of a warm prompt writes nothing here. After the clock went back, the last use lies in the future
-- and does not tell whether it is due: that is sampled as well.
local touch, last_use = 0, 0
if matched > 0 then
  local head, uses, used, rest = string.match(held[replica], '^(%S+ %S+ %S+ %S+) (%d+) (%d+) (.+)')
  last_use = tonumber(used)
  local is_sampled = seed % HIT_SAMPLE == 0
  local counted = matched < count and is_sampled
  if now - last_use > TOUCH_MS or (last_use > now and is_sampled) then
    touch, used = 1, now_text
    if last_use < since_ms then -- claimed in an earlier life of the same name: counted from now on
      add(KEYS[5], replica, tonumber(string.match(head, '^%S+ %S+ %S+ (%d+)$')))
    end
  end
  if counted then
    uses = tonumber(uses) + HIT_SAMPLE
  end
  if counted or touch == 1 then
    redis.call('HSET', KEYS[FIRST_OWN + matched - 1], replica, head .. ' ' .. uses .. ' ' .. used .. ' ' .. rest)
  end
end

-- The replica's agent, where a live one watches this life of it and somebody applies what it says. While it relearns,
-- requests whose prefix it may never have been told of ask the engine to say it: not too many, and not while the
-- engine has others waiting.
local mode, report = '', 0
local agent_of, until_ms, agent_mode, relearning, waiting = string.match(
  field_of(KEYS[10], replica) or '', '^%S+ (%S+) (%d+) (%S+) (%d) (%d+)')
local applied_until = string.match(field_of(KEYS[12], 'events:' .. replica) or '', '^%S+ (%d+)$')
local is_followed = agent_of == incarnation and agent_mode ~= 'none' and tonumber(until_ms) >= now
if is_followed and tonumber(applied_until or 0) >= now then
  mode = agent_mode
  if ARGV[24] == '1' and relearning == '1' and waiting == '0' and (claimed_from > 0 or kind == 'claim') then
    local asked_ms = tonumber(field_of(KEYS[11], replica) or 0) or 0
    if asked_ms > now or now - asked_ms >= REPORT_MS then
      report = 1
      write('HSET', KEYS[11], replica, string.format('%d', now))
    end
  end
end

if claimed_from > 0 or report == 1 then
  local chain = {}
  for index = 1, count do
    chain[index] = string.sub(KEYS[FIRST_OWN + index - 1], -32)
  end
  local head = { replica, incarnation, report, ARGV[11], ARGV[23] }
  write_down(KEYS[9], now, tonumber(ARGV[19]), ARGV[21], table.concat(head, ' ') .. ' ' .. table.concat(chain, ' '))
end

local loaded = math.max(0, stored_tokens - matched_tokens) * fleet.store_credit[chosen]
local uncached = math.max(0, math.floor(prompt_tokens - matched_tokens - loaded))
local in_flight = table.concat({ replica, incarnation, since_text, uncached, ARGV[21] }, ' ')
count_in(ARGV[3], in_flight, KEYS[7], KEYS[3], KEYS[4])
local failures, open_until = string.match(breakers[replica] or '', '^(%d+) (%d+)')
if open_until and open_until ~= '0' then
  redis.call('HSET', KEYS[2], replica, failures .. ' ' .. string.format('%d', now + tonumber(ARGV[18])) .. ' 1')
end

return {
  'ok', replica, incarnation, url, why, matched, matched_tokens, claimed_from, touch, last_use, uncached, kind, entry,
  now, mode, report, stored_keys, stored_tokens,
  math.max(0, fleet.held_tokens - math.max(fleet.matched[chosen], stored_tokens)),
}
