-- Who owns how much of a chain. The keys own:<key> of the chain are KEYS[OWN_OFFSET + index], shallow to deep. A residency
-- is valid while its entry is not below the replica's floor.
-- Which keys exist is found exactly, with EXISTS over ranges. How deep a replica owns the chain is found by
-- bisection, too: a replica that holds a prefix holds everything before it. So an earlier key has all owners of a later
-- one. If this is not true, a replica's match is too small, never too large.
-- A key may have any number of owners. If it has more than FEW_OWNERS, the walk reads the records of the replicas that it
-- is asked about, and those that the subset's orders add (see orders).

-- include owned

local MAX_STEPS, FEW_OWNERS = 4, 4

-- The deepest index in 1..last whose key exists, or 0. Most prompts go on where a known one ended, so the search goes up
-- from the last key, in steps that grow. If most likely none exists (`is_likely_new`), all are asked for at once.
local function deepest_existing(last, is_likely_new)
  local lo, hi, step = is_likely_new and 1 or last, last, 1
  while hi > 0 and redis.call('EXISTS', unpack(KEYS, OWN_OFFSET + lo, OWN_OFFSET + hi)) == 0 do
    hi, step = lo - 1, step * 4
    lo = math.max(1, hi - step + 1)
  end
  while lo < hi do
    local middle = math.ceil((lo + hi) / 2)
    if redis.call('EXISTS', unpack(KEYS, OWN_OFFSET + middle, OWN_OFFSET + hi)) > 0 then
      lo = middle
    else
      hi = middle - 1
    end
  end
  return hi
end

-- Whether a replica's record is valid: it is of this incarnation, and not below the floor.
local function is_valid(record, replica)
  local life = life_of_name[replica]
  if not life or string.sub(record, 1, #life) ~= life then
    return false
  end
  local floor = floor_of[replica]
  if not floor then
    return true
  end
  local entry = string.match(record, '^%S+ resident %S+ %S+ %S+ %S+ (%d+)')
  return entry == nil or tonumber(entry) >= floor
end

-- Reads owners of key `index`: all if they are few, else some, those among `names` included. With `clean`, records of
-- past incarnations are dropped. A record below the floor stays until the worker sweeps it, because owned_tokens count
-- it.
-- Returns the owners whose records are valid (replica -> record), and how many owners there are.
local function owners_of(index, names, depth, orders, clean)
  local key, owners = KEYS[OWN_OFFSET + index], {}
  local count = redis.pcall('HLEN', key)
  if type(count) ~= 'number' or count == 0 then -- it is no hash, or there is none
    return owners, 0
  end
  local fields = {}
  if count <= FEW_OWNERS then
    fields = redis.call('HGETALL', key)
  else
    local asked = names
    while #asked > 0 do
      local records = redis.call('HMGET', key, unpack(asked))
      for i = 1, #asked do
        if records[i] then
          fields[#fields + 1], fields[#fields + 2] = asked[i], records[i]
        end
      end
      asked = asked == names and orders and orders.more_owners(key, count, fields, depth) or {}
    end
  end
  learn(fields, 2)
  for i = 1, #fields, 2 do
    local replica, record = fields[i], fields[i + 1]
    local life = life_of_name[replica]
    if is_valid(record, replica) then
      owners[replica] = record
    elseif clean and (life and string.sub(record, 1, #life) ~= life or not record_of[replica]) then
      redis.call('HDEL', key, replica)
      if not parts_of_ownership(record) then
        tell(owned_tokens_key, 'own', replica)
      end
    end
  end
  return owners, count
end

-- For each replica in `below` whose depth is not known yet, finds the deepest index between `lo` and `hi` that it owns:
-- sets depth[replica] to the index and record[replica] to the record there. Owners that are first seen on the way are
-- included.
local function gallop(lo, below, hi, orders, depth, record)
  local names = {}
  for replica in pairs(below) do
    if depth[replica] == nil then
      names[#names + 1] = replica
    end
  end
  if #names == 0 then
    return
  end
  if hi - lo <= 1 then
    for i = 1, #names do
      depth[names[i]], record[names[i]] = lo, below[names[i]]
    end
    return
  end
  local middle = math.floor((lo + hi) / 2)
  gallop(middle, owners_of(middle, names, depth, orders), hi, orders, depth, record)
  gallop(lo, below, middle, orders, depth, record)
end

-- The owners of the deepest key that exists (replica -> record), if they are few and all of their records are valid, and
-- the deepest index up to which any other replica owns the chain. An earlier key has all owners of a later one, so it
-- has more owners where others own it, too. Returns nil if they are many or one is not valid.
local function few_owners(deepest, start, clean)
  local owners, count = owners_of(deepest, {}, {}, nil, clean)
  local valid = 0
  for _, record in pairs(owners) do
    valid = parts_of_ownership(record) and valid + 1 or valid
  end
  if valid < count or count == 0 then
    return
  end
  local lo, hi = start - 1, deepest
  while hi - lo > 1 do
    local middle = lo == start - 1 and start or math.floor((lo + hi) / 2) -- most often nobody else owns any of it
    if redis.pcall('HLEN', KEYS[OWN_OFFSET + middle]) == count then
      hi = middle
    else
      lo = middle
    end
  end
  return owners, lo
end

-- Walks the chain up from the deepest index whose key exists, for the replicas in `names` and other owners. Matches that
-- end above index `start` are worth nothing, so they are not looked for. With `clean`, records of past incarnations at
-- the deepest keys are dropped.
-- Returns depth (replica -> index), record (replica -> its record there), and the deepest index at which a key exists
-- after that (keys with nothing but records below a floor exist, too).
local function walk(deepest, names, orders, clean, start)
  local depth, record = {}, {}
  local top, left, owners, count, valid = deepest, 0, nil, 0, 0
  while top > 0 do
    owners, count = owners_of(top, names, depth, orders, clean)
    for replica, text in pairs(owners) do
      depth[replica], record[replica], valid = top, text, valid + 1
    end
    if valid > 0 then
      break
    end
    if left == 0 then
      left = redis.call('EXISTS', KEYS[OWN_OFFSET + top]) * top
    end
    top = deepest_existing(top - 1)
  end
  local owns_alone = top <= start or (valid == count and count == redis.pcall('HLEN', KEYS[OWN_OFFSET + start]))
  if not owns_alone then
    local others = {}
    for i = 1, #names do
      if depth[names[i]] == nil then
        others[#others + 1] = names[i]
      end
    end
    -- A key that ends within the first block is never resident: the search starts at the first key that has owners.
    local first, below, end_of_search = start - 1, nil, count > FEW_OWNERS and top + 1 or top
    repeat
      first = first + 1
      below, count = owners_of(first, others, depth, orders)
    until count > 0 or first >= top - 1 or first >= start + MAX_STEPS
    gallop(first, below, end_of_search, orders, depth, record)
  end
  for replica, text in pairs(record) do
    if not parts_of_ownership(text) then -- its shallower records are not looked for this time
      if clean then
        redis.call('HDEL', KEYS[OWN_OFFSET + depth[replica]], replica)
        tell(owned_tokens_key, 'own', replica)
      end
      depth[replica], record[replica] = nil, nil
    end
  end
  return depth, record, math.max(top, left)
end
