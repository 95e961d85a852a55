-- Use of the matched key. Hits by other continuations are counted by sampling, and the last use is written at most once
-- per 10 s, so a warm prompt normally writes nothing here. After the clock went back, the last use lies in the future
-- and does not tell whether it is due: then it is written by sampling, too.
local TOUCH_MS = 10000
local head, uses, used, rest = string.match(pick.held[replica], '^(%S+ %S+ %S+ %S+) (%d+) (%d+) (.+)')
last_use = tonumber(used)
local is_sampled = seed % HIT_SAMPLE == 0
local counted = matched < count and is_sampled
if now - last_use > TOUCH_MS or (last_use > now and is_sampled) then
  touch, used = 1, now_text
  if last_use < since_ms then -- claimed before this incarnation was registered: counted from now on
    add(owned_tokens_key, replica, tonumber(string.match(head, '^%S+ %S+ %S+ (%d+)$')))
  end
end
if counted then
  uses = tonumber(uses) + HIT_SAMPLE
end
if counted or touch == 1 then
  redis.call('HSET', KEYS[OWN_OFFSET + matched], replica, head .. ' ' .. uses .. ' ' .. used .. ' ' .. rest)
end
