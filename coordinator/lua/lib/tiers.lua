-- What caches besides a GPU's are worth: CPU memory of a replica, and LMCache's chunks in this Redis, which every
-- replica that LMCache serves can load.
--   tiers        replica -> "<cpu> <store>": the part of a token's prefill that loading it saves, as the agent measured
--                it. <cpu> "-": not measured. <store> "-": nothing to load from; "?": not measured there yet.
--   chunk:<key>  "<tokens> <name>": how many of the tokens up to the key fill whole chunks; <name> is LMCache's name of
--                the last of them.
-- Nobody reports whether a chunk is still there: chunks expire, are evicted and are deleted, so the script asks Redis.

local MIN_STORED_TOKENS, NO_TIERS = 64, '- -'

-- A number from 0 to 1; nil if the text is none.
local function share_of(text)
  local share = tonumber(text)
  return share and share >= 0 and share <= 1 and share or nil
end

local function tier_credits(record, cpu_default, store_default)
  if not record then -- nearly always so without LMCache: then no pattern is matched for each candidate
    return cpu_default, 0
  end
  local cpu, store = string.match(record, '^(%S+) (%S+)')
  return share_of(cpu) or cpu_default, share_of(store) or (store == '?' and store_default or 0)
end

-- The deepest key of the chain up to which all known chunks are there, and the tokens in these chunks; 0, 0 if there is
-- none.
local function stored_prefix(count)
  local base, names = string.match(replicas_key, '^(.*:)[^:]+$'), {}
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

-- Says what each candidate's cache is worth to the prompt: what it has matched, on the medium that holds it, plus what
-- it can load beyond that. Sets fleet.credit, cpu_credit and store_credit. Returns how many keys and tokens LMCache has
-- in Redis.
local function weigh_tiers(fleet, held, tiers_key, prompt_tokens, count, cpu_default, store_default)
  local tiers, measured, is_stored, stored_keys, stored_tokens = pairs_of(tiers_key), nil, false, 0, 0
  for replica, record in pairs(tiers) do -- replicas of a pool are alike: what one has measured is assumed of the others
    if record == NO_TIERS then
      tiers[replica] = nil
    else
      local store = string.match(record, '^%S+ (%S+)$')
      is_stored = is_stored or (store and store ~= '-')
      store = share_of(store)
      measured = store and math.max(store, measured or 0) or measured
    end
  end
  if is_stored and count > 0 and prompt_tokens - math.min(unpack(fleet.matched)) >= MIN_STORED_TOKENS then
    stored_keys, stored_tokens = stored_prefix(count)
  end
  for i = 1, fleet.count do
    local record, matched = held[fleet.name[i]], fleet.matched[i]
    local cpu, store = tier_credits(tiers[fleet.name[i]], cpu_default, measured or store_default)
    local credit = matched
    if record and string.match(record, '^%S+ %S+ (%S+)') == 'cpu' then
      credit = matched * cpu
    end
    if stored_tokens > matched then
      credit = credit + (stored_tokens - matched) * store
    end
    fleet.credit[i] = credit
    fleet.cpu_credit[i], fleet.store_credit[i] = cpu, store
  end
  return stored_keys, stored_tokens
end
