local MOST_PATIENT, LEAST_PATIENCE_MS = 8, 500

-- Takes a seat, or is charged if others wait: then it returns nil. `best_held`: the most keys that any replica owns;
-- `full`: what a replica costs that has more of the prompt and no room. With `explain` it returns why the request would
-- wait (nil if it would not), and for how long. A function, because it is a step that ends in many ways.
local function take_turn()
-- include turns
  local names, depth = pick.names, pick.depth
  local base, queue = base_of(waiting_key), queue_of(digest, pinned, tried)
  local band, tenant, weight, output_tokens, since, wait_ms, starve_ms =
    string.match(line, '^(%d+) (%S+) (%S+) (%d+) (%d+) (%d+) (%d+)$')
  band = tonumber(band)
  local name, key = band .. ' ' .. queue, asked and asked.key or nil
  if key and has_waiting and size_of(line_key(base, name, key)) > 0 then
    blocked_by, must_wait = key, true -- others with its key come first
  end
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
    local refusal, expected_ms, ahead = refusal_of(base, band, queue, tenant, math.huge, blocked_by)
    return {
      why = blocked_by and 'concurrency' or prefers and 'prefers' or is_behind and 'others_wait' or 'no_room',
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
    refusal, expected_ms = refusal_of(base, band, queue, tenant, left_ms, blocked_by)
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
  local seat = {
    band = band, tenant = tenant, weight = weight, tokens = uncached, output_tokens = output_tokens, queue = queue,
    since_ms = since_ms, starve_ms = tonumber(starve_ms), settings = all_settings(), keys = KEYS, argv = ARGV,
    key = is_patient and held_key or '-',
    until_ms = is_patient and now + math.floor(math.min(patience_ms, MOST_PATIENCE_MS)) or 0, account = key,
  }
  take_seat(base, gateway, reservation, seat, now)
  if asked then
    budget.reserve(reservation, asked, uncached, now, false)
  end
  if blocked_by and blocked_by == key then
    park_seat(base, name, tenant, key, member_of(gateway, reservation, seat), now)
  elseif blocked_by then
    park(base, name, tenant, now)
  end
  return { 'wait', since_ms, expected_ms, (must_wait or prefers) and '' or replica }
end
