-- An answer's usage told how long a prompt was. The record of its tip becomes exact, if it still is this request's
-- claim, and the length is passed to the replica's agent.
--
-- KEYS
--   hash    own:<tip>
--   list    measured:<replica>
-- ARGV
--   text    replica, reservation, prompt_tokens
--   text    told: the JSON that the agent is told; "" if there is no agent
--   text    ttl_s: of what the agent is told
-- Returns 1 if the claim was found, else 0.

-- include safe

local MAX_TOLD = 512 -- the agent fetches them twice a second

if told ~= '' then
  write('RPUSH', measured_key, told)
  redis.call('LTRIM', measured_key, -MAX_TOLD, -1)
  redis.call('EXPIRE', measured_key, ttl_s)
end
local record = field_of(own_key, replica)
if not record then
  return 0
end
local head, by = string.match(record, '^(%S+ claim %S+ %S+ %S+ %S+) (%S+)')
if by ~= reservation then
  return 0
end
redis.call('HSET', own_key, replica, head .. ' ' .. by .. ' ' .. prompt_tokens)
return 1
