-- Who owns how much of a chain. KEYS[FIRST_OWN..] are own:<key>, shallow to deep; a record in one is
--   "<incarnation> <claim|resident> <medium> <span_tokens> <hits> <last_use_ms> <reservation id>"
-- Existence is searched exactly (EXISTS on ranges, bisected). Which replicas own a shallower part is galloped:
-- whoever holds a prefix holds everything before it, so owner sets only grow towards the root. Where that does
-- not hold (a capped key), a replica's credit is understated, never invented.

-- The deepest index in lo..hi whose key exists, or 0.
local function deepest_existing(lo, hi)
  if hi < lo or redis.call('EXISTS', unpack(KEYS, FIRST_OWN + lo - 1, FIRST_OWN + hi - 1)) == 0 then
    return 0
  end
  while lo < hi do
    local middle = math.ceil((lo + hi) / 2)
    if redis.call('EXISTS', unpack(KEYS, FIRST_OWN + middle - 1, FIRST_OWN + hi - 1)) > 0 then
      lo = middle
    else
      hi = middle - 1
    end
  end
  return lo
end

-- The live owners of key `index` (replica -> record) and the number of records that no live incarnation has.
local function owners_of(index, incarnations)
  local fields = redis.call('HGETALL', KEYS[FIRST_OWN + index - 1])
  local owners, stale = {}, {}
  for i = 1, #fields, 2 do
    if incarnations[fields[i]] == string.match(fields[i + 1], '^%S+') then
      owners[fields[i]] = fields[i + 1]
    else
      stale[#stale + 1] = fields[i]
    end
  end
  return owners, stale
end

-- depth[replica] = deepest index it owns, for the replicas in `below` that are not known yet.
local function gallop(lo, below, hi, incarnations, depth)
  local open = false
  for replica in pairs(below) do
    if depth[replica] == nil then
      open = true
      break
    end
  end
  if not open then
    return
  end
  if hi - lo <= 1 then
    for replica in pairs(below) do
      depth[replica] = depth[replica] or lo
    end
    return
  end
  local middle = math.floor((lo + hi) / 2)
  local owners = owners_of(middle, incarnations)
  gallop(middle, owners, hi, incarnations, depth)
  gallop(lo, below, middle, incarnations, depth)
end

-- Walks the chain of `count` keys from the tip up.
-- Returns depth (replica -> index), the deepest index with a live owner (0: none), the owners there, and the
-- deepest index at which a key exists once records of dead incarnations are gone.
local function walk(count, incarnations, clean)
  local depth, owners = {}, {}
  local top = deepest_existing(1, count)
  while top > 0 do
    local stale
    owners, stale = owners_of(top, incarnations)
    if clean and #stale > 0 then
      redis.call('HDEL', KEYS[FIRST_OWN + top - 1], unpack(stale))
    end
    if next(owners) then
      break
    end
    top = deepest_existing(1, top - 1)
  end
  if top > 0 then
    for replica in pairs(owners) do
      depth[replica] = top
    end
    if top > 1 then
      gallop(1, (owners_of(1, incarnations)), top, incarnations, depth)
    end
  end
  return depth, top, owners
end
