-- What gateways are told of a pool: `view` has a line for each replica, and `view_changes` the version at which each
-- line changed last. Nobody has to raise a version: a heartbeat makes the lines from the records and compares them with
-- those that are there, so a change is found whoever wrote it. The heartbeats of all gateways share one comparison as
-- long as it is fresh: a comparison takes some microseconds a replica, and there is at most one in 0.4 ms a replica.
-- coordinator/README.md tells how a line reads. It has no time that moves while all is well.

-- include safe
-- include parts

local VIEW_MS_A_RECORD, SMALL_POOL = 0.4, 8

-- Whether it is a replica's record (see register), and can be read. "?" is no replica's name.
local function is_replica(name, record)
  local capacity_tokens, since_ms, floor = string.match(record, '^%S+ %l+ (%d+) (%d+) (%d+) %S')
  return capacity_tokens and is_number(capacity_tokens) and is_number(since_ms) and is_number(floor) and name ~= '?' and
    not string.find(name .. record, '[^\32-\126]')
end

-- The id, the version and when it was made; nil if there is no view, or it cannot be read.
local function view_head(view_key)
  local text = redis.call('HGET', view_key, '?') or ''
  local id, version, made_ms = string.match(text, '^(%d+) (%d+) (%d+) %d+ %d+$')
  if id and is_number(version) and is_number(made_ms) then
    return id, tonumber(version), tonumber(made_ms)
  end
end

-- For how long a view of so many records is fresh.
local function view_lasts_ms(records)
  return math.max(0, records - SMALL_POOL) * VIEW_MS_A_RECORD
end
