-- `place`, of a request that may be placed at two replicas.
--
-- KEYS
--   hash    placing...: the keys of `place`
-- ARGV
--   text    arguments...: of `place`
-- Returns the reply of `place`. If the request has a second place, the reply of that is one value more.

local function place(KEYS, ARGV)
-- include whole place
end

-- include pair
return paired(place, KEYS, ARGV)
