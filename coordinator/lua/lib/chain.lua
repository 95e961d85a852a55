-- Who owns how much of a chain. The keys own:<key> of the chain are KEYS[OWN_OFFSET + index], shallow to deep. A record
-- in one of them is
--   "<incarnation> claim <medium> <span_tokens> <hits> <last_use_ms> <reservation> [<tokens>]", a prediction; <tokens>
--     is the length of the prompt up to the key, once an answer has told it, or
--   "<incarnation> resident <medium> <span_tokens> <hits> <last_use_ms> <entry> <tokens> <block hash>", as the engine's
--     events said in that entry of the replica's stream; it is valid while <entry> is not below the replica's floor.
-- Which keys exist is found exactly, by bisection with EXISTS over ranges. How deep each replica owns the chain is
-- found by bisection, too: a replica that holds a prefix holds everything before it. So an earlier key has all owners
-- of a later one. If this is not true (at a key with the maximum of owners), a replica's match is too small, never too
-- large.

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

-- Whether a record is valid: it is of this incarnation, and not below the floor. `life` is { incarnation, floor }, or
-- false if the replica's own record cannot be read.
local function is_valid(record, life)
  if not life or string.match(record, '^%S+') ~= life[1] then
    return false
  end
  if life[2] == 0 then
    return true
  end
  local entry = string.match(record, '^%S+ resident %S+ %S+ %S+ %S+ (%d+)')
  return entry == nil or tonumber(entry) >= life[2]
end

-- The owners of key `index` whose records are valid, and those whose records are of a past incarnation (both: replica
-- -> record). A record below the floor is in neither: it stays until the worker sweeps it, because owned_tokens count
-- it.
local function owners_of(index, lives)
  local fields = redis.pcall('HGETALL', KEYS[OWN_OFFSET + index]) -- empty if it is no hash
  local owners, stale = {}, {}
  for i = 1, #fields, 2 do
    local replica, record = fields[i], fields[i + 1]
    local life = lives[replica]
    if is_valid(record, life) then
      owners[replica] = record
    elseif life == nil or (life and string.match(record, '^%S+') ~= life[1]) then
      stale[replica] = record
    end
  end
  return owners, stale
end

-- Drops records of key `index`. A record that cannot be read may be counted in owned_tokens, so they are summed again.
local function drop(index, records)
  for replica, record in pairs(records) do
    redis.call('HDEL', KEYS[OWN_OFFSET + index], replica)
    if not string.find(record, OWNERSHIP) then
      mark(owned_tokens_key, replica, 1)
    end
  end
end

-- For each replica in `below` whose depth is not known yet, finds the deepest index between `lo` and `hi` that it owns:
-- sets depth[replica] to the index and record[replica] to the record there.
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

-- Walks the chain of `count` keys from the tip up. Matches that end above index `start` are worth nothing, so they are
-- not looked for. With `clean`, records of past incarnations are dropped.
-- Returns depth (replica -> index), record (replica -> its record there), and the deepest index at which a key exists
-- after that (keys with nothing but records below a floor exist, too).
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
    -- A key that ends within the first block is never resident: the search starts at the first key that has owners.
    local first, below = start, nil
    repeat
      below = first < top and owners_of(first, lives) or {}
      first = first + 1
    until next(below) or first >= top or first > start + MAX_STEPS
    gallop(first - 1, below, top, lives, depth, record)
  end
  for replica, text in pairs(record) do
    if not string.find(text, OWNERSHIP) then -- its shallower records are not looked for this time
      if clean then
        drop(depth[replica], { [replica] = text })
      end
      depth[replica], record[replica] = nil, nil
    end
  end
  return depth, record, math.max(top, left)
end
