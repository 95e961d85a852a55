-- An answer's usage said how long a prompt was: its tip, while it still is this request's claim, is exact from now on, and
-- the replica's agent, where one listens, is told.
--
-- KEYS[1] own:<tip>   KEYS[2] measured:<replica>
-- ARGV[1] replica   ARGV[2] reservation id   ARGV[3] prompt_tokens   ARGV[4] what the agent is told (JSON; "": nothing)
-- ARGV[5] ttl_s of what the agent is told
-- Returns 1 where the claim was found, else 0.

-- include safe

local MAX_TOLD = 512 -- until the agent comes for them: it does twice a second

if ARGV[4] ~= '' then
  write('RPUSH', KEYS[2], ARGV[4])
  redis.call('LTRIM', KEYS[2], -MAX_TOLD, -1)
  redis.call('EXPIRE', KEYS[2], ARGV[5])
end
local record = field_of(KEYS[1], ARGV[1])
if not record then
  return 0
end
local head, by = string.match(record, '^(%S+ claim %S+ %S+ %S+ %S+) (%S+)')
if by ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], head .. ' ' .. by .. ' ' .. ARGV[3])
return 1
