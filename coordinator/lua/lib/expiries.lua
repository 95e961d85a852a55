-- Expiries of a hash's records once Redis' clock went back by `back_ms` (0: it did not). What lies beyond `seen_ms`,
-- which nothing written since can reach, was written before: it moves back as well. What is beyond `latest_ms` even
-- then ends there. `flat` is the hash as HGETALL answers, and is changed with it. `pattern` splits a record in three;
-- the second is when it ends.
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
