-- Writes a request's chain down, for the replica's agent and for the reaper. Two hashes, bound:0 and bound:1, take
-- turns of ttl_ms, and shorter turns while chains come so fast that MAX_BYTES are written within one. The first writer of
-- a turn empties the hash of two turns ago. The field "@" holds the number of a hash's turn, and "@bytes" how many bytes
-- were written in it. Turns are numbered by the clock; one that began early has the number of the next. If a number lies
-- further in the future, the clock went back: the hash is kept and belongs to this turn from now on. Gateways of an
-- older version write into the hash whose turn it is by the clock, and count no bytes.

-- include safe

local MAX_BYTES = 128 * 1024 * 1024
local BYTES_PER_CHAIN = 100 -- of Redis, beside the text

local function write_down(bound_key, now, ttl_ms, tip, text)
  local turn, stands, bytes = math.floor(now / ttl_ms), {}, {}
  for slot = 0, 1 do
    local told = redis.pcall('HMGET', bound_key .. ':' .. slot, '@', '@bytes')
    stands[slot], bytes[slot] = tonumber(told[1] or -1) or -1, sum_of(told[2])
  end
  local current = turn % 2
  if stands[1 - current] > stands[current] then
    current = 1 - current
  end
  local last = 1 - current
  if stands[current] > turn + 1 then
    stands[current] = turn
    write('HSET', bound_key .. ':' .. last, '@', string.format('%d', turn - 1))
  elseif stands[current] < turn or bytes[current] >= MAX_BYTES then
    local begins_early = stands[current] >= turn
    if begins_early then
      redis.call('HSET', bound_key .. ':' .. current, '@', string.format('%d', turn))
    end
    if begins_early or stands[current] == turn - 1 then
      current = last
    else -- both are old
      current = turn % 2
    end
    redis.call('UNLINK', bound_key .. ':' .. current)
    stands[current], bytes[current] = begins_early and turn + 1 or turn, 0
  end
  local written = bytes[current] + #text + BYTES_PER_CHAIN
  redis.call('HSET', bound_key .. ':' .. current, '@', string.format('%d', stands[current]), '@bytes',
    string.format('%d', written), tip, text)
end
