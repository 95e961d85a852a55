-- Chooses one of a model's backends by their weights, and runs `place` there: one call, so the weights hold exactly over all
-- gateways. A conversation that has begun stays with its backend, and is not counted. Nor is a request that another try may
-- place, or that is above a limit. One that is refused because too many wait there has had its turn: else the next one would
-- get the same turn, and a full backend would keep the requests of all others out. One that may cost more than is left of a
-- budget is not tried at another backend: their prices are the same, and who holds its prompt must not change the weights.
--
-- KEYS
--   hash    placing...: the keys of `place` for the first backend
-- ARGV
--   text    arguments...: of `place` for the first backend, so that a request that goes there costs little more than by
--             `place` alone. Then the chains of the others, "<key, tokens in 8 characters>...". Then these others, as a list
--             of JSON: [name, weight, how many of these keys come before its own, how many it has, the beginning of its keys,
--             [number, key...], how many arguments come before the tokens, [number, argument...], the number of the argument
--             `chain`], where only keys and arguments are named that differ from those of the first one. Then "<name of the
--             first one> <its weight> <sum of weights> <1 if the conversation has begun before, else 0> <conversation; "-":
--             it has none> <its key `stays`> <this key of the turn before> <key `shares`> <its field>"
-- Returns the reply of `place`, and as one value more the number of the chosen backend, from 1

local STAY_S, KEY_CHARS, STEP_CHARS = '3600', 32, 40

local last = #ARGV
local steps, others, choice = ARGV[last - 2], ARGV[last - 1], ARGV[last]
ARGV[last], ARGV[last - 1], ARGV[last - 2] = nil, nil, nil
local first, weight, all, has_begun, conversation, stays, last_stays, shares, field = string.match(
  choice, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (.*)$')

local function read_others() -- takes time, and most requests go to the first one
  if type(others) == 'string' then
    others = cjson.decode(others)
  end
  return others
end

local chosen, noted, stay, turns = nil, nil, nil, nil
if has_begun == '1' then
  noted = redis.pcall('HGET', stays, conversation)
  stay = noted or redis.pcall('HGET', last_stays, conversation)
end
if stay == first then
  chosen = 1
elseif stay then
  for i, other in ipairs(read_others()) do
    chosen = other[1] == stay and i + 1 or chosen
  end
end
if not chosen then
  turns = redis.pcall('HINCRBY', shares, field, '1')
  if type(turns) ~= 'number' then -- another kind of key, or no number
    redis.pcall('DEL', shares)
    turns = redis.pcall('HINCRBY', shares, field, '1')
  end
  -- Of as many turns in a row as the sum of weights, each backend gets its weight, spread evenly: the first one takes its
  -- share of the turns, the second one its share of those that are left, and so on.
  local turn, left, floor = type(turns) == 'number' and (turns - 1) % all or 0, all, math.floor
  local before = floor(turn * weight / left + 0.5)
  chosen = 1
  while floor((turn + 1) * weight / left + 0.5) == before do
    turn, left, weight, chosen = turn - before, left - weight, read_others()[chosen][2], chosen + 1
    before = floor(turn * weight / left + 0.5)
  end
end

local function place(KEYS, ARGV)
-- include whole place
end

-- include pair

local function place_at(number)
  if number == 1 then
    return paired(place, KEYS, ARGV)
  end
  local _, _, from, length, beginning, changed_keys, count, changed, chain_at = unpack(read_others()[number - 1])
  local keys, arguments, chain, sub = {}, {}, {}, string.sub
  local fixed, ours = #KEYS - (#ARGV - count), #string.match(KEYS[PLACING_OFFSET + 1], '^.-}:') + 1
  for i = 1, fixed do
    keys[i] = beginning .. sub(KEYS[i], ours)
  end
  for i = 1, #changed_keys, 2 do
    keys[changed_keys[i]] = changed_keys[i + 1]
  end
  for i = 1, count do
    arguments[i] = ARGV[i]
  end
  for i = 1, #changed, 2 do
    arguments[changed[i]] = changed[i + 1]
  end
  local own, at = beginning .. 'own:', from * STEP_CHARS
  for i = 1, length do
    local key = sub(steps, at + 1, at + KEY_CHARS)
    chain[i], keys[fixed + i], arguments[count + i] = key, own .. key, sub(steps, at + KEY_CHARS + 1, at + STEP_CHARS)
    at = at + STEP_CHARS
  end
  arguments[chain_at] = table.concat(chain, ' ')
  return paired(place, keys, arguments)
end

-- A backend whose replicas are all gone, which its gateway does not know yet, has written nothing.
local reply, tried = place_at(chosen), chosen
for number = 1, reply[1] == 'none' and #read_others() + 1 or 0 do
  if number ~= tried and reply[1] == 'none' then
    chosen, reply = number, place_at(number)
  end
end

local status = reply[1]
local is_served = status == 'ok' or status == 'wait'
if turns and not is_served and status ~= 'full' and status ~= 'full_tenant' and status ~= 'unreachable' then
  redis.pcall('HINCRBY', shares, field, '-1')
end
if is_served and conversation ~= '-' then
  local name = chosen == 1 and first or read_others()[chosen - 1][1]
  if name ~= noted then
    redis.pcall('HSET', stays, conversation, name)
    redis.pcall('EXPIRE', stays, STAY_S)
  end
end
reply[#reply + 1] = chosen
return reply
