-- A pair: one replica computes a request's prompt, and another one takes the KV cache from it and decodes. `run(keys, argv)`
-- is `place`. It first places the request where it is to be decoded. If much of the prompt is missing there, it is run once
-- more, under another reservation, among the replicas that compute prompts for others. The operand `pair` is JSON:
--   least_tokens     a prompt of which less is missing is computed where it is decoded
--   subset_at, subset        the number of the key `subset`, and what it is in the second run
--   arguments        [number, argument...]: those that differ in the second run
--   except_at        names of replicas that compute their prompts themselves
--   needed_at        names of those that never do: nil in requests of older gateways
--   tried_at         the number of one more of these: the first place is none
-- Returns the reply of the first run. If that is a place, the reply has one value more: the reply of the second place, or why
-- there is none, see Placement.unpaired.

local PAIR_AT, RESERVATION_AT = 1, 4
local REPLICA, WHY, MATCHED_TOKENS, UNCACHED, KIND, MODE, AHEAD = 2, 5, 7, 11, 12, 15, 23
local MOST_RATIO = 2 -- of the times until the prompt is computed elsewhere, and where it is decoded
local ANY = 1e15

local function has(names, name)
  for i = 1, #names do
    if names[i] == name then
      return true
    end
  end
  return false
end

-- The reply of the second place of the request that got the first one by `reply`; or why it has none.
local function second_place(run, keys, argv, reply, pair)
  if reply[WHY] == 'last_resort' or reply[WHY] == 'pinned' then
    return reply[WHY]
  end
  -- What it only claims to hold may be on its way to it, and then another replica has it already. Without an agent that
  -- confirms claims, they all stay claims.
  local is_unsure = reply[KIND] == 'claim' and reply[MODE] == 'session'
  local missing = reply[UNCACHED] + (is_unsure and reply[MATCHED_TOKENS] or 0)
  local most_tokens = MOST_RATIO * (reply[AHEAD] + missing)
  if has(pair.needed_at or {}, reply[REPLICA]) then
    most_tokens = ANY
  elseif has(pair.except_at, reply[REPLICA]) then
    return 'itself'
  elseif missing < pair.least_tokens then
    return 'short'
  end
  local tried = argv[pair.tried_at]
  argv[pair.tried_at] = tried == '' and reply[REPLICA] or tried .. ' ' .. reply[REPLICA]
  argv[PAIR_AT] = string.format('%d %s %s', most_tokens, reply[REPLICA], argv[RESERVATION_AT])
  keys[pair.subset_at] = pair.subset
  for i = 1, #pair.arguments, 2 do
    argv[pair.arguments[i]] = pair.arguments[i + 1]
  end
  -- An error must not hide the place that the first run has reserved. Nor must a subset that is not declared: its
  -- gateway keeps that alive, so this lasts for a moment.
  local is_run, other = pcall(run, keys, argv, true)
  local status = is_run and other[1]
  if status == 'ok' then
    return other
  end
  return (status == 'no_room' or status == 'wait') and 'no_room' or 'none'
end

local function paired(run, keys, argv)
  local reply, text = run(keys, argv), argv[PAIR_AT]
  if text ~= '' and reply[1] == 'ok' and type(reply[UNCACHED]) == 'number' then
    reply[#reply + 1] = second_place(run, keys, argv, reply, cjson.decode(text))
  end
  return reply
end
