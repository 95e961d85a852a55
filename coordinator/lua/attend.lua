-- An agent's heartbeat: holds the replica for it (one agent at a time), says what it knows, and takes what it is told.
-- A record is "<agent> <incarnation> <lease_until_ms> <mode> <1 while relearning> <waiting> <seq>": `mode` is how chains
-- are learned (session | token_ids), `waiting` the engine's queue, `seq` the last engine batch that was worked in.
--
-- KEYS[1] agents   KEYS[2] replicas   KEYS[3] asks   KEYS[4] measured:<replica>   KEYS[5] engines   KEYS[6] entries
-- KEYS[7] events:<replica>   KEYS[8] cursors
-- ARGV[1] replica   ARGV[2] agent   ARGV[3] incarnation   ARGV[4] lease_ms (0: leave)   ARGV[5] mode
-- ARGV[6] relearning   ARGV[7] waiting   ARGV[8] seq ("": what the last agent of this life said stands)
-- ARGV[9] the engine's counters (JSON; "": not known)
-- ARGV[10] how many measured prompts of the last answer were worked in   ARGV[11] the last of these: an answer that did
--          not arrive is given again
-- Returns {"held", ms until it may be free} where another agent has it, {"unregistered"} where this is not the
--         replica's incarnation, {"unreadable"} where its record cannot be read, or {"ok", what was held before
--         ("": nothing), what is asked ("" | "restate" | "reset"),
--         measured prompts, entries published so far, 1 where this agent's own lease had lapsed}

-- include time
-- include entries

check_hashes(KEYS[1], KEYS[2], KEYS[3], KEYS[5], KEYS[6], KEYS[8])
redis.call('LRANGE', KEYS[4], 0, 0)
check_stream(KEYS[7])
local now = now_ms()
local record = redis.call('HGET', KEYS[1], ARGV[1]) or ''
local agent, of, until_ms, stood = string.match(record, '^(%S+) (%S+) (%d+) %S+ %S+ %S+ (%-?%d+)')
if record ~= '' and agent == nil then
  tell(KEYS[1], ARGV[1])
end
if agent and agent ~= ARGV[2] and tonumber(until_ms) >= now then
  return { 'held', math.min(tonumber(until_ms) - now, tonumber(ARGV[4])) } -- longer only once the clock went back
end
if ARGV[4] == '0' then
  if agent == ARGV[2] then -- what it knew is kept for its successor, and when it went
    redis.call('HSET', KEYS[1], ARGV[1],
      (string.gsub(record, '^(%S+ %S+) %d+', '%1 ' .. string.format('%d', now - 1))))
  end
  return { 'ok', record, '', {}, 0, 0 }
end
local registered = redis.call('HGET', KEYS[2], ARGV[1])
local current, floor = string.match(registered or '', '^(%S+) %S+ %d+ %d+ (%d+) %S')
if registered and current == nil then
  return { 'unreadable' }
elseif current ~= ARGV[3] then
  return { 'unregistered' }
end
local seq = ARGV[8]
if seq == '' then
  seq = of == ARGV[3] and stood or '-1'
end
local lease_until = string.format('%d', now + tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], ARGV[1],
  table.concat({ ARGV[2], ARGV[3], lease_until, ARGV[5], ARGV[6], ARGV[7], seq }, ' '))
if ARGV[9] ~= '' then
  redis.call('HSET', KEYS[5], ARGV[1], ARGV[9])
end
local asked = redis.call('HGET', KEYS[3], ARGV[1]) or ''
if asked ~= '' then
  redis.call('HDEL', KEYS[3], ARGV[1])
end
local taken = tonumber(ARGV[10])
if taken > 0 and redis.call('LINDEX', KEYS[4], taken - 1) == ARGV[11] then
  redis.call('LTRIM', KEYS[4], taken, -1)
end
local measured = redis.call('LRANGE', KEYS[4], 0, -1)
local entries = entries_of(KEYS[6], ARGV[1], KEYS[7], KEYS[8], floor)
local lapsed = agent == ARGV[2] and tonumber(until_ms) < now and 1 or 0
return { 'ok', record, asked, measured, entries, lapsed }
