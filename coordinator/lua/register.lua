-- Makes a replica known, or corrects what is known of it. A new incarnation starts with no load and owns
-- nothing: its sums are reset, and ownership records of older incarnations are ignored from here on.
-- A record is "<incarnation> <state> <capacity_tokens> <since_ms> <floor> <url>"; residency that was said before
-- entry `floor` of the replica's event stream does not hold any more (see apply).
--
-- KEYS[1] replicas   KEYS[2] active   KEYS[3] backlog_tokens   KEYS[4] owned_tokens   KEYS[5] breakers
-- ARGV[1] replica   ARGV[2] incarnation   ARGV[3] state ("ready" | "dead")   ARGV[4] capacity_tokens (0: unknown)
-- ARGV[5] url   ARGV[6] "1": only if no record stands, or one of an earlier life (a gateway that returns must not
-- undo what it missed), else "0". Lives are told apart where they are an engine's start time, in hex.
-- Returns "same", "changed" or "new".

-- include time
-- include safe

check_hashes(KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5])
local record = redis.call('HGET', KEYS[1], ARGV[1])
local incarnation, since_ms, floor
if record then
  incarnation, since_ms, floor = string.match(record, '^(%S+) %S+ %d+ (%d+) (%d+) %S')
end
if record and ARGV[6] == '1' then
  if incarnation == nil then
    return 'same' -- it cannot be read: the chores write it again as it was
  end
  local stands, started = tonumber(incarnation, 16), tonumber(ARGV[2], 16)
  if stands == nil or started == nil or started <= stands then
    return 'same'
  end
end
local status = 'changed'
if incarnation ~= ARGV[2] then
  status, floor = 'new', '0'
  -- Later than any life before it, so that no two of a replica are ever taken for one.
  since_ms = string.format('%d', math.max(now_ms(), tonumber(since_ms or 0) + 1))
  redis.call('HSET', KEYS[2], ARGV[1], 0)
  redis.call('HSET', KEYS[3], ARGV[1], 0)
  redis.call('HSET', KEYS[4], ARGV[1], 0)
  redis.call('HDEL', KEYS[5], ARGV[1])
end
local wanted = table.concat({ ARGV[2], ARGV[3], ARGV[4], since_ms, floor, ARGV[5] }, ' ')
if record == wanted then
  return 'same'
end
redis.call('HSET', KEYS[1], ARGV[1], wanted)
return status
