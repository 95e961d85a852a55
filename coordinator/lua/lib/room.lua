-- Whether a replica has room for one more request: fewer requests than max_active_requests (0: any number), and prompt
-- tokens ahead that it computes in less than max_wait_s (0: any number). Room never depends on the size of a request, so a
-- very long prompt gets its turn, too. `share` is the part of all room that the request may use.

-- has_room(replica, active, backlog, share), and with_room(fleet, share): the names of those candidates that have room.
local has_room, with_room
do
  local rate_of = {} -- prefill tokens per second, as text; false: not measured

  function has_room(replica, active, backlog, share)
    if max_active_requests > 0 and active >= math.max(1, math.floor(max_active_requests * share)) then
      return false
    elseif max_wait_s == 0 then
      return true
    end
    if backlog > 0 and rate_of[replica] == nil then
      rate_of[replica] = field_of(rates_key, replica)
    end
    local rate = sum_of(rate_of[replica])
    return backlog < max_wait_s * share * (rate > 0 and rate or prefill_tokens_per_s)
  end

  function with_room(fleet, share)
    local rates, names = redis.pcall('HMGET', rates_key, unpack(fleet.name)), {}
    for i = 1, fleet.count do
      rate_of[fleet.name[i]] = rates[i] or false
      if has_room(fleet.name[i], fleet.active[i], fleet.backlog[i], share) then
        names[#names + 1] = fleet.name[i]
      end
    end
    return names
  end
end
