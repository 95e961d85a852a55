-- Who owns how much of a chain. KEYS behind OWN_OFFSET are own:<key>, shallow to deep; a record in one is
--   "<incarnation> claim <medium> <span_tokens> <hits> <last_use_ms> <reservation id> [<tokens>]", a prediction,
--     with the tokens behind it once an answer has told them, or
--   "<incarnation> resident <medium> <span_tokens> <hits> <last_use_ms> <entry> <tokens> <block hash>", as the engine's
-- events told in that entry of the replica's stream; it holds while <entry> is not below the replica's floor.
-- Existence is searched exactly (EXISTS on ranges, bisected). Which replicas own a shallower part is galloped:
-- whoever holds a prefix holds everything before it, so owner sets only grow towards the root. Where that does
-- not hold (a capped key), a replica's credit is understated, never invented.

-- include owned

local MAX_STEPS = 4

-- The deepest index in lo..hi whose key exists, or 0.
local function deepest_existing(lo, hi)
  if hi < lo or redis.call('EXISTS', unpack(KEYS, OWN_OFFSET + lo, OWN_OFFSET + hi)) == 0 then
    return 0
  end
  while lo < hi do
    local middle = math.ceil((lo + hi) / 2)
    if redis.call('EXISTS', unpack(KEYS, OWN_OFFSET + middle, OWN_OFFSET + hi)) > 0 then
      lo = middle
    else
      hi = middle - 1
    end
  end
  return lo
end

-- Whether a record holds: of this life, and not below the floor. `lives` is replica -> { incarnation, floor }, or false
-- where the replica's own record cannot be read.
local function holds(record, life)
  if not life or string.match(record, '^%S+') ~= life[1] then
    return false
  end
  if life[2] == 0 then
    return true
  end
  local entry = string.match(record, '^%S+ resident %S+ %S+ %S+ %S+ (%d+)')
  return entry == nil or tonumber(entry) >= life[2]
end

-- The owners of key `index` whose record holds, and those whose record is of a past life (both: replica -> record).
-- (What lies below a floor stays until the worker sweeps it: it counts in owned_tokens.)
local function owners_of(index, lives)
  local fields = redis.pcall('HGETALL', KEYS[OWN_OFFSET + index]) -- empty where it is no hash
  local owners, stale = {}, {}
  for i = 1, #fields, 2 do
    if holds(fields[i + 1], lives[fields[i]]) then
      owners[fields[i]] = fields[i + 1]
    elseif lives[fields[i]] == nil or (lives[fields[i]] and string.match(fields[i + 1], '^%S+') ~= lives[fields[i]][1]) then
      stale[fields[i]] = fields[i + 1]
    end
  end
  return owners, stale
end

-- Drops owners' records of key `index`. One that cannot be read may have been counted in owned_tokens .
local function drop(index, records)
  for replica, record in pairs(records) do
    redis.call('HDEL', KEYS[OWN_OFFSET + index], replica)
    if not string.find(record, OWNERSHIP) then
      mark(owned_tokens_key, replica, 1)
    end
  end
end

-- depth[replica] = deepest index it owns, for the replicas in `below` that are not known yet; record[replica] = there.
local function gallop(lo, below, hi, lives, depth, record)
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
    for replica, text in pairs(below) do
      if depth[replica] == nil then
        depth[replica], record[replica] = lo, text
      end
    end
    return
  end
  local middle = math.floor((lo + hi) / 2)
  local owners = owners_of(middle, lives)
  gallop(middle, owners, hi, lives, depth, record)
  gallop(lo, below, middle, lives, depth, record)
end

-- Walks the chain of `count` keys from the tip up; below `start` a prefix is worth nothing.
-- Returns depth (replica -> index), record (replica -> its record there), and the deepest index at which a key exists
-- once records of past lives are gone (what lies below a floor still is there).
local function walk(count, lives, clean, start)
  local depth, record = {}, {}
  local owners = {}
  local top, left = deepest_existing(1, count), 0
  while top > 0 do
    local stale
    owners, stale = owners_of(top, lives)
    if clean then
      drop(top, stale)
    end
    if next(owners) then
      break
    end
    if left == 0 then
      left = redis.call('EXISTS', KEYS[OWN_OFFSET + top]) * top
    end
    top = deepest_existing(1, top - 1)
  end
  if top > 0 then
    for replica, text in pairs(owners) do
      depth[replica], record[replica] = top, text
    end
    -- What ends within a first block is never resident: the gallop starts at the first key that has owners.
    local first, below = start, nil
    repeat
      below = first < top and owners_of(first, lives) or {}
      first = first + 1
    until next(below) or first >= top or first > start + MAX_STEPS
    gallop(first - 1, below, top, lives, depth, record)
  end
  for replica, text in pairs(record) do
    if not string.find(text, OWNERSHIP) then -- what lies above it is not seen this time
      if clean then
        drop(depth[replica], { [replica] = text })
      end
      depth[replica], record[replica] = nil, nil
    end
  end
  return depth, record, math.max(top, left)
end
