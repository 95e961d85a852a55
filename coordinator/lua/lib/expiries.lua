-- Expiries after Redis' clock was set.

-- Returns when something ends that is to end at `until_ms`. If the clock went back by `back_ms` (0: it did not), an
-- expiry beyond `seen_ms` was written before that, so it moves back by as much. No expiry lies beyond `latest_ms`.
local function end_in_time(until_ms, back_ms, seen_ms, latest_ms)
  if back_ms > 0 and until_ms > seen_ms then
    until_ms = math.max(until_ms - back_ms, 0)
  end
  return math.min(until_ms, latest_ms)
end

-- Writes a record again with another expiry. `head` is the pattern of what stands before the expiry, in a capture.
local function write_expiry(key, field, record, head, ends_ms)
  redis.call('HSET', key, field, (string.gsub(record, head .. '%d+', '%1' .. string.format('%d', ends_ms), 1)))
end
