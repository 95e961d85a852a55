-- Whose turn it is: start-time fair queueing (Goyal, Vin, Cheng 1996) between the tenants of a band. A request starts at
-- max(virtual time, its tenant's finish tag) and ends at its start + charge / weight. The next one is that with the
-- least start. The virtual time is the start of the last one granted. The charge is in tokens: uncached ones, and those
-- of the answer times a weight. It is estimated when the request is placed, and corrected at its end.
-- Without anybody waiting nothing is counted, and what was counted is forgotten: a tenant is not to pay for having used
-- what nobody else wanted.

-- include safe

local function as_tag(text)
  local tag = tonumber(text or 0)
  return tag and tag > 0 and tag < 1e15 and tag or 0
end

-- The virtual time of a band, the finish tag of a tenant in it, and when the busy time began (false: none has).
local function tags_of(base, band, tenant)
  local found = redis.pcall('HMGET', base .. 'fair', band, band .. ' ' .. tenant, '#')
  return as_tag(found[1]), as_tag(found[2]), found[3]
end

local function tag_text(tag)
  return string.format('%.3f', tag)
end

-- When the next request of a tenant starts.
local function start_tag(base, band, tenant)
  local virtual, finish = tags_of(base, band, tenant)
  return tag_text(math.max(virtual, finish))
end

local line_names

-- Sets a tenant's finish tag and its place in the turns of all queues, at a virtual time. More fields and values may be
-- written with it.
local function finish_at(base, band, tenant, tag, virtual, ...)
  write('HSET', base .. 'fair', band .. ' ' .. tenant, tag_text(tag), ...)
  line_names = line_names or redis.pcall('HKEYS', base .. 'waiting') -- read once: no script that charges begins a line
  for i = 1, #line_names do
    if string.match(line_names[i], '^%d+') == tostring(band) then
      redis.pcall('ZADD', base .. 'turns:' .. line_names[i], 'XX', tag_text(math.max(tag, virtual)), tenant)
    end
  end
end

-- Charges a tenant for a request that was placed while others waited. More fields of `fair` may be written with it.
local function charge(base, gateway, reservation, band, tenant, weight, tokens, now, ...)
  local virtual, finish, began = tags_of(base, band, tenant)
  local start = math.max(virtual, finish)
  tokens, began = math.max(1, tokens), began or string.format('%d', now)
  finish_at(base, band, tenant, start + tokens / weight, start, band, tag_text(start), '#', began, ...)
  local entry = string.format('%d %s %s %d %s', band, tenant, weight, tokens, began)
  write('HSET', base .. 'charges:' .. gateway, reservation, entry)
end

-- Ends a charge. `used` is what the request took, in tokens; nil if its answer did not tell. That of an earlier busy time
-- is forgotten.
local function settle_charge(base, gateway, reservation, used)
  local key = base .. 'charges:' .. gateway
  local band, tenant, weight, tokens, began = string.match(field_of(key, reservation) or '', '^(%d+) (%S+) (%S+) (%d+) (%d+)$')
  redis.pcall('HDEL', key, reservation)
  weight = tonumber(weight or 0) or 0
  if used and weight > 0 then
    local virtual, finish, busy_since = tags_of(base, band, tenant)
    if finish > 0 and began == busy_since then
      finish_at(base, band, tenant, math.max(0, finish + (math.max(1, used) - tonumber(tokens)) / weight), virtual)
    end
  end
end

-- The field that says when a band goes first once, and its value.
local function starving_at(band, at_ms)
  return '@' .. band, string.format('%d', at_ms)
end

-- Whether a band has got nothing for too long.
local function is_starving(base, band, now)
  local at_ms = tonumber(field_of(base .. 'fair', '@' .. band) or 0) or 0
  return at_ms > 0 and at_ms <= now
end

local function forget_tags(base)
  redis.call('UNLINK', base .. 'fair', base .. 'paces', base .. 'patient', base .. 'waiting_tokens')
end
