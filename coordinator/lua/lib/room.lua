-- Whether a replica has room for one more request: fewer requests than max_active_requests (0: any number), and prompt
-- tokens ahead that it computes in less than max_wait_s (0: any number). Room never depends on the size of a request, so a
-- very long prompt gets its turn, too. `share` is the part of all room that the request may use.

-- `rate`: the replica's prefill tokens per second; "" or false: not measured.
local function has_room(active, backlog, rate, share)
  if max_active_requests > 0 and active >= math.max(1, math.floor(max_active_requests * share)) then
    return false
  end
  local rate_now = sum_of(rate)
  return max_wait_s == 0 or backlog < max_wait_s * share * (rate_now > 0 and rate_now or prefill_tokens_per_s)
end

-- Those of the candidates that have room, by their names.
local function with_room(fleet, rates_key, share)
  local rates, names = redis.pcall('HMGET', rates_key, unpack(fleet.name)), {}
  for i = 1, fleet.count do
    if has_room(fleet.active[i], fleet.backlog[i], rates[i], share) then
      names[#names + 1] = fleet.name[i]
    end
  end
  return names
end
