-- Claims every key deeper than those that the replica already owns.
local claimed_tokens = 0
local function is_claimable(key)
  local mine = field_of(key, replica)
  if mine and string.match(mine, '^%S+') == incarnation then
    if is_valid(mine, replica) then
      return false
    end
    -- This record is replaced.
    claimed_tokens = claimed_tokens - counted_span(mine, incarnation, since_ms, owned_tokens_key, replica)
  end
  return true
end
local head, tail = incarnation .. ' claim gpu ', ' 0 ' .. now_text .. ' ' .. reservation
local behind, record, record_span = tokens_at(matched), '', nil
for index = matched + 1, count do
  local key = KEYS[OWN_OFFSET + index]
  local span = tonumber(ARGV[TOKENS_OFFSET + index]) - behind
  local is_new = index > pick.top
  if span ~= record_span then -- most keys add as much as the one before
    record, record_span = head .. span .. tail, span
  end
  if is_new or is_claimable(key) then
    if is_new then -- most often: so this is short
      redis.call('HSET', key, replica, record)
    else
      write_counted('own', key, replica, record)
    end
    claimed_tokens = claimed_tokens + span
    if claimed_from == 0 then
      claimed_from = index
    end
  end
  behind = behind + span
end
if claimed_tokens ~= 0 then
  add(owned_tokens_key, replica, claimed_tokens)
end
