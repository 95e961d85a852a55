-- Redis' own clock, in whole milliseconds: no caller's clock ever decides a lease.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
