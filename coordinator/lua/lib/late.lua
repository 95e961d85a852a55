-- Which replicas are slow, by the first bytes that were late (see hedge.lua). The others' records are dropped.

-- include safe
-- include tables

local SLOWER = 4

-- Counts first bytes, and returns what hedge.lua returns.
local function note_late(late_key, first_bytes, now)
  local FADES_MS, LEAST_LATE, SLOW_SHARE, SLOW_MS, AGAIN_MS = 10000, 3, 0.7, 30000, 120000
  local known, told = pairs_of(late_key), {}
  for replica, late, all in string.gmatch(first_bytes, '(%S+) (%d+) (%d+)') do
    told[replica] = { tonumber(late), tonumber(all) }
    known[replica] = known[replica] or '0 0 0 0'
  end
  local found = {}
  for replica, record in pairs(known) do
    local late, all, at_ms, until_ms = string.match(record, '^(%S+) (%S+) (%d+) (%d+)$')
    local faded = math.exp((math.min(now, sum_of(at_ms)) - now) / FADES_MS)
    local more = told[replica] or { 0, 0 }
    local on_time = math.max(0, sum_of(all) - sum_of(late)) * faded
    if more[1] > 0 and more[1] == more[2] then
      on_time = on_time / 2 -- one after the other is late: what was before says little
    end
    late, until_ms = sum_of(late) * faded + more[1], math.min(sum_of(until_ms), now + SLOW_MS)
    all = late + on_time + more[2] - more[1]
    local least = until_ms > now - AGAIN_MS and 1 or LEAST_LATE -- most likely it is slow still
    if late >= least and late >= SLOW_SHARE * all then
      until_ms = now + SLOW_MS
    end
    if late < 0.1 and until_ms <= now - AGAIN_MS then
      redis.call('HDEL', late_key, replica)
    else
      write('HSET', late_key, replica, string.format('%.3f %.3f %d %d', late, all, now, until_ms))
      found[#found + 1], found[#found + 2] = replica, until_ms > now and 1 or 0
    end
  end
  return found
end
