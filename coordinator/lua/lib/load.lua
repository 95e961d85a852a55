-- Load accounting. flight:<gateway> is the truth. active and backlog_tokens are its sums, over the reservations that
-- were made since the current incarnation of each replica was registered. An entry in flight is
--   "<replica> <incarnation> <since_ms> <backlog_tokens> <tip>"
-- where since_ms is that of the replica's record: an incarnation that is registered again starts from zero again.

-- include subsets

-- The current incarnation of a replica and its since_ms; nil if there is none, or its record cannot be read.
local function life_of(replicas_key, replica)
  return string.match(field_of(replicas_key, replica) or '', '^(%S+) %S+ %d+ (%d+) %d+ %S')
end

-- Adds to the sums of a replica, and orders it anew.
local function add_load(active_key, backlog_key, replica, requests, backlog)
  local active_now = requests ~= 0 and add(active_key, replica, requests)
  local backlog_now = backlog ~= 0 and add(backlog_key, replica, backlog)
  local base = string.sub(active_key, 1, -7) -- without "active"
  local digests = field_of(base .. 'subsets_of', replica)
  if digests then
    active_now = sum_of(active_now or field_of(active_key, replica))
    reorder_load(base, digests, replica, active_now, sum_of(backlog_now or field_of(backlog_key, replica)), requests)
  end
end

-- Puts a new entry into flight and adds it to the sums.
local function count_in(id, entry, flight_key, active_key, backlog_key)
  local replica, backlog = string.match(entry, '^(%S+) %S+ %S+ (%S+)')
  write_counted('flight', flight_key, id, entry)
  add_load(active_key, backlog_key, replica, 1, tonumber(backlog))
end

-- Subtracts `requests` and the entry's backlog from the sums. The sums do not include reservations of an earlier
-- incarnation, so nothing is subtracted for these. Returns the fields of the entry; nil if it cannot be read. The sums
-- are made again after that, and after a replica's record could not be read (see repair).
local function uncount(entry, requests, replicas_key, active_key, backlog_key)
  local replica, incarnation, since_ms, backlog, tip = string.match(entry, '^(%S+) (%S+) (%d+) (%d+) ?(%S*)')
  if replica == nil or not is_number(backlog) then
    tell(active_key, 'flight', '')
    return
  end
  local current, current_since = life_of(replicas_key, replica)
  if incarnation == current and since_ms == current_since then
    if requests ~= 0 or backlog ~= '0' then
      add_load(active_key, backlog_key, replica, -requests, -tonumber(backlog))
    end
  end
  return replica, incarnation, since_ms, tip
end

-- The prompt of a reservation is no backlog of its replica any more: subtracts it, and writes the entry without it.
local function end_backlog(id, entry, flight_key, replicas_key, active_key, backlog_key)
  local replica, incarnation, since_ms, tip = uncount(entry, 0, replicas_key, active_key, backlog_key)
  if replica then
    redis.call('HSET', flight_key, id, table.concat({ replica, incarnation, since_ms, '0', tip }, ' '))
  else
    redis.call('HDEL', flight_key, id)
  end
end

-- Subtracts an entry that has left flight from the sums.
local function give_back(entry, replicas_key, active_key, backlog_key)
  uncount(entry, 1, replicas_key, active_key, backlog_key)
end
