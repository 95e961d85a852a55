-- How fast the replicas compute prompts, of the mean; see beat.lua, which finds it out. Most fleets are equally fast: then
-- `speeds` is nil, and nothing here is made. Lua allows 200 local names in a script, so this is one.
local speeds
if has_any and redis.pcall('HLEN', speeds_key) ~= 0 then
  speeds = {}

  -- Those of the named replicas; 1 of one that is not measured. The second value is that of the fastest of all.
  function speeds.of(names)
    local told, found = redis.pcall('HMGET', speeds_key, '?', unpack(names)), {}
    for i = 1, #names do
      local speed = sum_of(told[i + 1]) / 100
      found[i] = speed > 0 and speed or 1
    end
    return found, math.max(1, sum_of(told[1]) / 100)
  end

  -- The requests that the load guard counts: a fast replica may have more. The first few never count, and
  -- max_active_requests is the same for all.
  function speeds.guarded(active, speed)
    if active < MIN_SLACK_REQUESTS then
      return 0
    end
    local is_full = max_active_requests > 0 and room_share == 0 and active >= max_active_requests
    return is_full and 1e15 or active / speed
  end

  -- A cost of which `fresh_tokens` would have to be computed anywhere: see costs.
  function speeds.cost(cost, fresh_tokens, speed)
    local weight = (CHARGED_WEIGHT - 1) * fresh_tokens
    return (cost - weight) / speed + weight
  end

  function speeds.note(fleet)
    fleet.guarded = {}
    fleet.speed, fleet.fastest = speeds.of(fleet.name)
    for i = 1, fleet.count do
      fleet.guarded[i] = speeds.guarded(fleet.active[i], fleet.speed[i])
    end
  end
end
