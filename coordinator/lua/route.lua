-- Chooses one of a model's backends by their weights, and runs `place` with that one's keys and arguments: one call, so the
-- weights hold exactly over all gateways. A conversation stays with its backend. Only what `place` has placed, or has given
-- a seat, is counted.
--
-- KEYS
--   string  shares: what each backend is owed: integers in the order of the model's backends, separated by spaces
--   string  stays: the backend of this conversation; the same key as `shares` if it has none
--   hash    placing...: the keys of `place`, for one backend after the other
-- ARGV
--   text    backends: those to choose from, "<name> <place in `shares`> <weight> <how many keys> <how many arguments>" each
--   text    arguments...: of `place`, for one backend after the other
-- Returns {the place of the chosen backend in `backends`, from 1; the reply of `place`}

local SHARES_S, STAY_S, MOST_OWED = '86400', '3600', 1000

local told, all = {}, 0
local first_key, first_argument = PLACING_OFFSET + 1, ARGUMENTS_OFFSET + 1
for name, at, weight, keys, arguments in string.gmatch(backends, '(%S+) (%d+) (%d+) (%d+) (%d+)') do
  told[#told + 1] = {
    name = name, at = tonumber(at), weight = tonumber(weight), key = first_key, argument = first_argument,
    last_key = first_key + keys - 1, last_argument = first_argument + arguments - 1,
  }
  first_key, first_argument = first_key + keys, first_argument + arguments
  all = all + tonumber(weight)
end

-- Smooth weighted round robin (as nginx's upstream module does it): each is owed its weight, who is owed most gets the
-- request and pays the sum. What cannot be read counts as 0.
local owed = {}
local text = redis.pcall('GET', shares_key)
for share in string.gmatch(type(text) == 'string' and text or '', '%S+') do
  owed[#owed + 1] = tonumber(share) or 0
end
local chosen, kept = nil, stays_key ~= shares_key and redis.pcall('GET', stays_key)
for i = 1, #told do
  local one = told[i]
  for at = #owed + 1, one.at do
    owed[at] = 0
  end
  one.owed = owed[one.at] + one.weight
  if one.name == kept and one.weight > 0 then
    chosen = i
  end
end
if not chosen then
  chosen = 1
  for i = 2, #told do
    if told[i].owed > told[chosen].owed then
      chosen = i
    end
  end
end

local function place(KEYS, ARGV)
-- include whole place
end

local one = told[chosen]
local reply = place({ unpack(KEYS, one.key, one.last_key) }, { unpack(ARGV, one.argument, one.last_argument) })
if reply[1] == 'ok' or reply[1] == 'wait' then
  for i = 1, #told do
    local most = MOST_OWED * all
    owed[told[i].at] = math.max(-most, math.min(most, told[i].owed - (i == chosen and all or 0)))
  end
  for i = 1, #owed do
    owed[i] = string.format('%d', owed[i])
  end
  redis.call('SET', shares_key, table.concat(owed, ' '), 'EX', SHARES_S)
  if stays_key ~= shares_key then
    redis.call('SET', stays_key, one.name, 'EX', STAY_S)
  end
end
return { chosen, reply }
