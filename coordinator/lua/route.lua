-- Chooses one of a model's backends by their weights, and runs `place` there: one call, so the weights hold exactly over all
-- gateways. A conversation stays with its backend. Only what `place` has placed, or has given a seat, is counted.
--
-- KEYS
--   hash    placing...: the keys of `place` for the first backend
-- ARGV
--   text    arguments...: of `place` for the first backend, so that a request that goes there costs little more than by
--             `place` alone. Then for each other backend, the last one first, [keys, arguments] of `place` as JSON. Then for
--             each, the last one first, its name, its number (from 1) and its weight. Then their sum, and how many backends
--             these are; the key `shares` and its field; the key `stays` of the conversation ("": it has none); 1 if the
--             conversation has begun before, else 0
-- Returns {the place of the chosen backend among these, from 1; the reply of `place`}

local STAY_S, MOST_OWED, take = '1800', 8, table.remove

local has_begun, stays, field, shares, count = take(ARGV) == '1', take(ARGV), take(ARGV), take(ARGV), take(ARGV)
local all, backends = tonumber(take(ARGV)), {}
for i = 1, tonumber(count) do
  backends[i] = { weight = tonumber(take(ARGV)), number = tonumber(take(ARGV)), name = take(ARGV) }
end
for i = 2, #backends do
  backends[i].placing = take(ARGV)
end

-- Smooth weighted round robin (as nginx's upstream module does it): each is owed its weight, who is owed most gets the
-- request and pays the sum. So nobody is owed more than a sum, but where conversations stay: that is not all repaid, or
-- a backend would get a burst of new ones when they end. What cannot be read counts as 0.
local owed, text = {}, redis.pcall('HGET', shares, field)
if type(text) == 'table' then
  redis.pcall('DEL', shares) -- another kind of key
end
for share in string.gmatch(type(text) == 'string' and text or '', '%S+') do
  owed[#owed + 1] = tonumber(share) or 0
end
local stay = has_begun and redis.pcall('GET', stays)
for i = 1, #backends do
  local one = backends[i]
  for number = #owed + 1, one.number do
    owed[number] = 0
  end
  one.owed = owed[one.number] + one.weight
  one.turn = one.name == stay and one.weight > 0 and math.huge or one.owed
end

local function place(KEYS, ARGV)
-- include whole place
end

-- A backend whose replicas are all gone, which its gateway does not know yet, has written nothing.
local chosen, reply, tried = 0, nil, 0
repeat
  chosen = 1
  for i = 2, #backends do
    chosen = backends[i].turn > backends[chosen].turn and i or chosen
  end
  backends[chosen].turn = -math.huge
  local keys, arguments = KEYS, ARGV
  if chosen > 1 then
    keys, arguments = unpack(cjson.decode(backends[chosen].placing))
  end
  reply, tried = place(keys, arguments), tried + 1
until reply[1] ~= 'none' or tried == #backends

if reply[1] == 'ok' or reply[1] == 'wait' then
  local most = MOST_OWED * all
  for i = 1, #backends do
    local one = backends[i]
    owed[one.number] = math.max(-most, math.min(most, one.owed - (i == chosen and all or 0)))
  end
  for number = 1, #owed do
    owed[number] = string.format('%d', owed[number])
  end
  redis.pcall('HSET', shares, field, table.concat(owed, ' '))
  if stays ~= '' then
    redis.pcall('SET', stays, backends[chosen].name, 'EX', STAY_S)
  end
end
return { chosen, reply }
