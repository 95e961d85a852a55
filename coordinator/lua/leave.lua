-- Ends the wait of requests whose clients have gone, or cannot wait any longer. A seat that was granted before, or was
-- never taken, changes nothing.
--
-- KEYS
--   hash    waiting
-- ARGV
--   text    gateway
--   text    seats...
-- Returns how many waited.

-- include time
-- include grants

local left, base = 0, base_of(waiting_key)
for i = SEATS_OFFSET + 1, #ARGV do
  left = left + (remove_seat(base, gateway, ARGV[i]) and 1 or 0)
end
if left > 0 then
  grant_turns(base, now_ms())
end
return left
