-- Load accounting. flight:<gateway> is the truth; active and backlog_tokens are its sums over the
-- reservations made since each replica's current incarnation was registered. A flight entry is
--   "<replica> <incarnation> <since_ms> <backlog_tokens> <tip>"
-- where since_ms is the record's: an incarnation that is registered again starts from zero again.

-- include safe

-- The current incarnation of a replica and the time since when, or nil; true behind them where its record cannot be
-- read.
local function life_of(replicas_key, replica)
  local record = field_of(replicas_key, replica)
  if record then
    local incarnation, since_ms = string.match(record, '^(%S+) %S+ %d+ (%d+) %d+ %S')
    return incarnation, since_ms, incarnation == nil
  end
end

-- The flight entry of a reservation that a gateway states; nil where the incarnation is not the current one.
local function entry_of(replicas_key, replica, incarnation, backlog, tip)
  local current, since_ms = life_of(replicas_key, replica)
  if incarnation == current then
    return table.concat({ replica, incarnation, since_ms, backlog, tip }, ' ')
  end
end

-- Puts a new entry into flight and into the sums.
local function count_in(id, entry, flight_key, active_key, backlog_key)
  local replica, backlog = string.match(entry, '^(%S+) %S+ %S+ (%S+)')
  write_counted(active_key, '', flight_key, id, entry)
  add(active_key, replica, 1)
  add(backlog_key, replica, tonumber(backlog))
end

-- Takes so many requests and their backlog out of the sums; what an earlier life was given died with it. Returns the
-- entry's words; nil where it cannot be read.
local function uncount(entry, requests, replicas_key, active_key, backlog_key)
  local replica, incarnation, since_ms, backlog, tip = string.match(entry, '^(%S+) (%S+) (%d+) (%d+) ?(%S*)')
  if replica == nil then
    mark(active_key, '', 1)
    return
  end
  local current, current_since, is_unreadable = life_of(replicas_key, replica)
  if is_unreadable then
    mark(active_key, '', 0)
  elseif incarnation == current and since_ms == current_since then
    if requests ~= 0 then
      add(active_key, replica, -requests)
    end
    if backlog ~= '0' then
      add(backlog_key, replica, -tonumber(backlog))
    end
  end
  return replica, incarnation, since_ms, tip
end

-- Takes an entry that left flight out of the sums.
local function give_back(entry, replicas_key, active_key, backlog_key)
  uncount(entry, 1, replicas_key, active_key, backlog_key)
end
