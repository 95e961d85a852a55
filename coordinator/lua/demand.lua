-- What a pool is asked for now, and what it has: for autoscalers, metrics and people. Changes nothing.
--
-- KEYS
--   hash    replicas, active, backlog_tokens, rates, gateways, holds, waiting, waiting_tokens
-- ARGV
--   number  prefill_tokens_per_s: of a replica whose rate is not measured
-- Returns {now_ms, ready replicas, draining ones, requests in flight on both, their prompt tokens not computed yet, prompt
-- tokens that the ready ones compute in a second, requests held until a replica is ready, their prompt tokens, lines},
-- where `lines` has five values for each line of the queue: band, queue, queued requests, prompt tokens that these have
-- to compute, since when the one waits that has waited longest (ms).

-- include time
-- include tables
-- include queue

local MOST_LOOKED_AT = 64

local now, base = now_ms(), base_of(waiting_key)
local active, backlog = pairs_of(active_key), pairs_of(backlog_tokens_key)
local rates, ready, draining, requests, tokens, rate = pairs_of(rates_key), 0, 0, 0, 0, 0
for replica, record in pairs(pairs_of(replicas_key)) do
  local state = string.match(record, '^%S+ (%S+) ')
  if state == 'ready' or state == 'draining' then
    requests, tokens = requests + sum_of(active[replica]), tokens + sum_of(backlog[replica])
  end
  if state == 'ready' then
    local measured = sum_of(rates[replica])
    ready, rate = ready + 1, rate + (measured > 0 and measured or prefill_tokens_per_s)
  elseif state == 'draining' then
    draining = draining + 1
  end
end

-- A gateway that is gone holds nothing.
local held, held_tokens = 0, 0
for gateway, text in pairs(pairs_of(holds_key)) do
  local until_ms = string.match(field_of(gateways_key, gateway) or '', '^%d+ (%d+)')
  if until_ms and tonumber(until_ms) >= now then
    local count, sum = string.match(text, '^(%d+) (%d+)$')
    held, held_tokens = held + sum_of(count), held_tokens + sum_of(sum)
  end
end

-- Since when the request of a line waits that has waited longest, of so many tenants.
local function oldest_of(name)
  local oldest, tenants = now, redis.pcall('ZRANGE', base .. 'turns:' .. name, 0, MOST_LOOKED_AT - 1)
  for i = 1, #tenants do
    local head = redis.pcall('ZRANGE', line_key(base, name, tenants[i]), 0, 0, 'WITHSCORES')
    oldest = math.min(oldest, tonumber(head[2]) or now)
  end
  return oldest
end

local lines = {}
for _, line in ipairs(waiting_lines(base)) do
  local at = #lines
  lines[at + 1], lines[at + 2], lines[at + 3] = line.band, line.queue, line.seats
  lines[at + 4], lines[at + 5] = sum_of(field_of(waiting_tokens_key, line.name)), oldest_of(line.name)
end
return { now, ready, draining, requests, tokens, math.floor(rate), held, held_tokens, lines }
