-- Load accounting. flight:<gateway> is the truth; active and backlog_tokens are its sums over the
-- reservations made since each replica's current incarnation was registered. A flight entry is
--   "<replica> <incarnation> <since_ms> <backlog_tokens> <tip>"
-- where since_ms is the record's: an incarnation that is registered again starts from zero again.

-- The current incarnation of a replica and the time since when, or nil.
local function life_of(replicas_key, replica)
  local record = redis.call('HGET', replicas_key, replica)
  if record then
    return string.match(record, '^(%S+) %S+ %S+ (%S+)')
  end
end

local function is_counted(replicas_key, replica, incarnation, since_ms)
  local current, current_since = life_of(replicas_key, replica)
  return incarnation == current and since_ms == current_since
end

-- The flight entry of a reservation that a gateway states; nil where the incarnation is not the current one.
local function entry_of(replicas_key, replica, incarnation, backlog, tip)
  local current, since_ms = life_of(replicas_key, replica)
  if incarnation == current then
    return table.concat({ replica, incarnation, since_ms, backlog, tip }, ' ')
  end
end

-- Puts a new entry into flight and into the sums.
local function count(id, entry, flight_key, active_key, backlog_key)
  local replica, backlog = string.match(entry, '^(%S+) %S+ %S+ (%S+)')
  redis.call('HSET', flight_key, id, entry)
  redis.call('HINCRBY', active_key, replica, 1)
  redis.call('HINCRBY', backlog_key, replica, backlog)
end

-- Takes an entry that left flight out of the sums; what an earlier life was given died with it.
local function give_back(entry, replicas_key, active_key, backlog_key)
  local replica, incarnation, since_ms, backlog = string.match(entry, '^(%S+) (%S+) (%S+) (%S+)')
  if is_counted(replicas_key, replica, incarnation, since_ms) then
    redis.call('HINCRBY', active_key, replica, -1)
    if backlog ~= '0' then
      redis.call('HINCRBY', backlog_key, replica, -tonumber(backlog))
    end
  end
end
