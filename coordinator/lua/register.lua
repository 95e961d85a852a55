-- Makes a replica known, or corrects what is known of it. A new incarnation starts with no load and owns nothing: its
-- sums are reset, and ownership records of older incarnations are ignored from here on. A record is "<incarnation>
-- <state> <capacity_tokens> <since_ms> <floor> <url>". Residency that was said before entry `floor` of the replica's
-- event stream is void (see apply).
--
-- KEYS
--   hash    replicas, active, backlog_tokens, owned_tokens, breakers, draining
-- ARGV
--   text    replica, incarnation
--   text    state: "ready" | "dead" | "hung" | "draining" | "asleep". A replica that is drained in this incarnation, or that
--             was found asleep and not awake since, is not ready.
--   text    capacity_tokens: 0 if unknown
--   text    url
--   flag    only_if_absent: write only if there is no record, or one of an earlier incarnation: a gateway that returns
--             must not undo what it missed. Incarnations can be compared: they are an engine's start time in hex, or
--             "life-<n>" if that is unknown.
-- Returns "same", "changed" or "new".

-- include time
-- include subsets

local function start_of(name)
  local life = string.match(name, '^life%-(%d+)$')
  return life and tonumber(life) or tonumber(name, 16)
end

check_hashes(replicas_key, active_key, backlog_tokens_key, owned_tokens_key, breakers_key)
local record = redis.call('HGET', replicas_key, replica)
local current, since_ms, floor
local drained, why = string.match(field_of(draining_key, replica) or '', '^(%S+) ?%d* ?(%S*)')
if record then
  current, since_ms, floor = string.match(record, '^(%S+) %S+ %d+ (%d+) (%d+) %S')
end
local is_lost = state == 'draining' and not drained -- the store was emptied, and an agent has been here since
if record and only_if_absent and not (is_lost and current == incarnation) then
  if current == nil then
    return 'same' -- it cannot be read: maintenance writes it again, as `view` has it
  end
  local known_start, start = start_of(current), start_of(incarnation)
  if known_start == nil or start == nil or start <= known_start then
    return 'same'
  end
end
local status = 'changed'
if current ~= incarnation then
  status, floor = 'new', '0'
  -- Later than that of any earlier incarnation, so that no two incarnations of a replica are taken for one.
  since_ms = string.format('%d', math.max(now_ms(), tonumber(since_ms or 0) + 1))
  redis.call('HSET', active_key, replica, 0)
  redis.call('HSET', backlog_tokens_key, replica, 0)
  redis.call('HSET', owned_tokens_key, replica, 0)
  redis.call('HDEL', breakers_key, replica)
end
if state == 'draining' and drained == '-' .. incarnation then
  state = 'ready'
elseif state == 'draining' and drained ~= incarnation then
  write('HSET', draining_key, replica, incarnation .. ' ' .. string.format('%d', now_ms()))
elseif state == 'ready' and drained == incarnation then
  state = why == 'asleep' and why or 'draining'
elseif drained and drained ~= incarnation and drained ~= '-' .. incarnation then
  redis.call('HDEL', draining_key, replica)
end
local wanted = table.concat({ incarnation, state, capacity_tokens, since_ms, floor, url }, ' ')
if record == wanted then
  return 'same'
end
redis.call('HSET', replicas_key, replica, wanted)
stand(base_of(replicas_key), replica, now_ms(), math.huge)
return status
