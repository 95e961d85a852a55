-- `place`, of a request that may be placed at two replicas.
--
-- KEYS
--   hash    placing...: the keys of `place`
-- ARGV
--   text    arguments...: of `place`
-- Returns the reply of `place`. If it is a place, it has one value more: see lib/pair.lua.

local function place(KEYS, ARGV)
-- include whole place
end

-- include pair
return paired(place, KEYS, ARGV)
