-- Gives reserved load back: the prefill backlog at the first token, the whole reservation at the end.
-- A reservation that is settled twice, or was never made, changes nothing. If requests wait, the room goes to them. This is
-- the only script that grants: whoever makes room in another way tells it so. The code of grants is long, and Redis' Lua
-- gets slower with every copy that it keeps.
--
-- KEYS
--   hash    flight:<gateway>, replicas, active, backlog_tokens, waiting, charges:<gateway>, tenants, budgets:<gateway>
--   hash    leased:<gateway>, spent:<gateway>
-- ARGV
--   text    gateway
--   text    sums: what the gateway has settled of budgets: see spending.settle in lib/spending.lua; "-": nothing new; "":
--             the same, and none of these requests holds anything of budgets by itself
--   text    settled(event, reservation, used)...: the event is "first_token" or "done". `used` are two numbers of tokens:
--             "<what the request is charged (see lib/fair.lua)> <what it takes of its accounts' limits>"; "" if not known.
--             With the event "room", the second text is a replica where room may have come ("": any), the third is ""
-- Returns the number of reservations that were found; with `sums`, what spending.settle returns.

-- include load
-- include spending

local MOST_FREED = 16

-- Where room has come, each replica once. It is not known if a `room` says so; if a reservation was not found: then a
-- placement may have given it back, which grants nothing; or if these are so many that one may as well look everywhere.
local found, freed, are_known, has_rooms = 0, {}, true, false
local function free(replica)
  for i = 1, #freed do
    if freed[i] == replica then
      return
    end
  end
  freed[#freed + 1] = replica
  are_known = are_known and replica ~= '' and #freed <= MOST_FREED
end

for i = SETTLED_OFFSET + 1, #ARGV, SETTLED_SIZE do
  local event, reservation = ARGV[i], ARGV[i + 1]
  local entry = event ~= 'room' and field_of(flight_key, reservation)
  if event == 'room' then
    has_rooms = true
    free(reservation)
  elseif not entry then
    are_known = false
  else
    found = found + 1
    free(string.match(entry, '^%S+') or '')
    if event == 'done' then
      redis.call('HDEL', flight_key, reservation)
      give_back(entry, replicas_key, active_key, backlog_tokens_key)
    else
      end_backlog(reservation, entry, flight_key, replicas_key, active_key, backlog_tokens_key)
    end
  end
end
local told = found
if sums ~= '' then
  local spending = spending_of(tenants_key, leased_key)
  told = spending.settle(spent_key, sums)
  for i = SETTLED_OFFSET + 1, #ARGV, SETTLED_SIZE do
    if ARGV[i] == 'done' then
      spending.free(ARGV[i + 1], told[1])
    end
  end
end
if redis.call('EXISTS', waiting_key, charges_key, budgets_key) > 0 then -- the code of grants is long
-- include time
-- include limits
-- include grants
  local base, now, budget = base_of(waiting_key), now_ms(), nil
  for i = SETTLED_OFFSET + 1, #ARGV, SETTLED_SIZE do
    if ARGV[i] == 'done' then
      local charge_tokens, limit_tokens = string.match(ARGV[i + 2], '^(%d+) (%d+)$')
      settle_charge(base, gateway, ARGV[i + 1], tonumber(charge_tokens))
      if field_of(budgets_key, ARGV[i + 1]) then
        budget = budget or budget_of(budgets_key, tenants_key)
      end
      local accounts = budget and budget.finish(ARGV[i + 1], tonumber(limit_tokens), now)
      if accounts then
        unpark(base, accounts)
        are_known = false -- its next request may wait for another replica than this one
      end
    end
  end
  -- An end makes room for at least one request, a `room` for any number.
  grant_turns(base, now, are_known and freed or nil, are_known and not has_rooms and found or nil)
end
return told
