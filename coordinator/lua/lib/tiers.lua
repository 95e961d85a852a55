-- What caches besides a GPU's are worth: CPU memory of a replica, and LMCache's chunks in this Redis, which every
-- replica that LMCache serves can load (`tiers` and `chunk:<key>` in coordinator/README.md).
-- Nobody reports whether a chunk is still there: chunks expire, are evicted and are deleted, so the script asks Redis.

local MIN_STORED_TOKENS = 64
-- What a cached token is worth that a replica must load: 1 is as much as on the GPU. These hold until an agent of the
-- pool has measured what loading saves: CPU memory is faster than a Redis behind a network.
local CPU_CREDIT, STORE_CREDIT = 0.8, 0.6

-- A number from 0 to 1; nil if the text is none.
local function share_of(text)
  local share = tonumber(text)
  return share and share >= 0 and share <= 1 and share or nil
end

-- The deepest key of the chain up to which all known chunks are there, and the tokens in these chunks; 0, 0 if there is
-- none.
local function stored_prefix(count)
  local base, names = base_of(replicas_key), {}
  for i = 1, count do
    names[i] = base .. 'chunk:' .. string.sub(KEYS[OWN_OFFSET + i], -32)
  end
  local records, known, chunks = redis.call('MGET', unpack(names)), {}, {}
  for i = 1, count do
    if records[i] then
      local tokens, chunk = string.match(records[i], '^(%d+) (.+)')
      if chunk and tonumber(tokens) <= tonumber(ARGV[TOKENS_OFFSET + i]) then
        known[#known + 1], chunks[#chunks + 1] = { i, tonumber(tokens) }, chunk
      end
    end
  end
  local there = #chunks > 0 and redis.pcall('EXISTS', unpack(chunks)) or 0
  if type(there) == 'number' and there < #chunks then
    there = 0
    while redis.call('EXISTS', chunks[there + 1]) == 1 do
      there = there + 1
    end
  end
  if type(there) ~= 'number' or there == 0 then -- an error: this user may not see keys of these names
    return 0, 0
  end
  return known[there][1], known[there][2]
end

-- Says what each candidate's cache is worth to the prompt: what it most likely holds, on the medium that holds it, plus
-- what it can load beyond that. Sets fleet.credit, cpu_credit and store_credit. Returns how many keys and tokens LMCache has
-- in Redis.
local function weigh_tiers(fleet, held, count, has_tiers)
  local names, likely, credit, cpu_credits, store_credits = fleet.name, fleet.likely, {}, {}, {}
  local tiers = has_tiers and redis.pcall('HMGET', tiers_key, unpack(names)) or {}
  local measured, is_stored, stored_keys, stored_tokens = STORE_CREDIT, false, 0, 0
  local is_measured = false
  for i = 1, fleet.count do -- replicas of a pool are alike: what one has measured is assumed of the others
    cpu_credits[i], store_credits[i] = CPU_CREDIT, 0
    if tiers[i] then
      local cpu, store = string.match(tiers[i], '^(%S+) (%S+)$')
      is_stored = is_stored or (store and store ~= '-')
      cpu_credits[i], store_credits[i] = share_of(cpu) or CPU_CREDIT, share_of(store) or (store == '?' and '?' or 0)
      if share_of(store) then
        measured, is_measured = math.max(share_of(store), is_measured and measured or 0), true
      end
    end
  end
  if is_stored and count > 0 and prompt_tokens - math.min(unpack(fleet.matched)) >= MIN_STORED_TOKENS then
    stored_keys, stored_tokens = stored_prefix(count)
  end
  for i = 1, fleet.count do
    local record = held[names[i]]
    credit[i] = likely[i]
    if store_credits[i] == '?' then
      store_credits[i] = measured
    end
    if record and string.match(record, '^%S+ %S+ (%S+)') == 'cpu' then
      credit[i] = likely[i] * cpu_credits[i]
    end
    if stored_tokens > likely[i] then
      credit[i] = credit[i] + (stored_tokens - likely[i]) * store_credits[i]
    end
  end
  fleet.credit, fleet.cpu_credit, fleet.store_credit = credit, cpu_credits, store_credits
  return stored_keys, stored_tokens
end
