-- Corrects the expiries in a hash's records after Redis' clock went back by `back_ms` (0: it did not). An expiry beyond
-- `seen_ms` must have been written before the clock went back, so it moves back by as much. An expiry that is still
-- beyond `latest_ms` is set to `latest_ms`. `flat` is the hash as HGETALL returns it, and is changed as well. `pattern`
-- splits a record in three parts, of which the second is the expiry.
local function keep_in_time(key, flat, pattern, back_ms, seen_ms, latest_ms)
  for i = 1, #flat, 2 do
    local head, until_text, rest = string.match(flat[i + 1], pattern)
    local until_ms = tonumber(until_text or '')
    if until_ms then
      local ends_ms = math.min(until_ms > seen_ms and math.max(until_ms - back_ms, 0) or until_ms, latest_ms)
      if ends_ms ~= until_ms then
        flat[i + 1] = head .. string.format('%d', ends_ms) .. rest
        redis.call('HSET', key, flat[i], flat[i + 1])
      end
    end
  end
end
