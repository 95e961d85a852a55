-- A gateway tells what it has placed, and how its first bytes came. A share of what was placed is the allowance for second
-- attempts: see steps/hedge.lua. A replica whose first bytes are late again and again, over all gateways, counts as slow for
-- SLOW_MS. Placements count a slow one as SLOWER times slower than it was measured: see beat.lua.
--
-- KEYS
--   hash    hedges: see lib/allowance.lua
--   hash    late: replica -> "<late> <all> <at_ms> <until when it is slow (ms)>"; both counts fade
-- ARGV
--   number  placed_tokens: what replicas compute of it, since the gateway told last
--   text    first_bytes: since then, by replica: "<replica> <late> <all> …"
-- Returns flat pairs of a replica that was late lately, and 1 if it is slow, else 0. Gateways go on to tell of these.

-- include time
-- include allowance
-- include late

local now = now_ms()
allow(hedges_key, placed_tokens, 0, 0, now)
return note_late(late_key, first_bytes, now)
