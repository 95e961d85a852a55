-- Puts queued requests into the queue of another subset: replicas that serve their model have come or gone. They keep
-- their places by time. A seat that was granted, or left, is skipped.
--
-- KEYS
--   hash    waiting
-- ARGV
--   text    gateway
--   text    digest: of the replicas that serve the model now
--   text    seats...
-- Returns how many were moved.

-- include time
-- include queue

local moved, base, now = 0, base_of(waiting_key), now_ms()

-- The same call of `place`, with another subset.
local function with_digest(values, before, after)
  for i = 1, #values do
    values[i] = values[i] == before and after or values[i]
  end
end

for i = SEATS_OFFSET + 1, #ARGV do
  local seat = seat_of(base, gateway, ARGV[i])
  local before, rest = string.match(seat and seat.queue or '', '^([^/]+)(.*)$')
  if before and before ~= digest then
    local name, member = string.format('%d %s', seat.band, seat.queue), member_of(gateway, ARGV[i], seat)
    local holder = holder_of(base, name, member, seat)
    with_digest(seat.argv, before, digest)
    with_digest(seat.keys, base .. 'subset:' .. before, base .. 'subset:' .. digest)
    seat.queue = digest .. rest
    take_seat(base, gateway, ARGV[i], seat, now)
    leave_line(base, name, holder, member, seat)
    moved = moved + 1
  end
end
return moved
