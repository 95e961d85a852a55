-- Puts what an entry of a replica's stream says into the map. `entry` has the replica, its incarnation, since when that
-- counts (`since_ms`), and the entry's number.

-- include owned
-- include parts

-- The place of the last reset in these lines; 0 if there is none. What stands before it is void.
local function last_reset(lines)
  for i = #lines, 1, -1 do
    if lines[i] == 'reset' then
      return i
    end
  end
  return 0
end

-- A key is resident now. Returns by how much owned_tokens grows, and when the key was used last.
local function become_resident(entry, own_key, line, owned_tokens_key, now_text)
  local tokens, span, medium, block_hash = string.match(line, '^%+ %S+ (%S+) (%S+) (%S+) (%S+)')
  local record = field_of(own_key, entry.replica)
  local hits, used, counted = '0', now_text, 0
  if record then
    counted = counted_span(record, entry.incarnation, entry.since_ms, owned_tokens_key, entry.replica)
    local of, was_hits, was_used = string.match(record, '^(%S+) %S+ %S+ %S+ (%d+) (%d+)')
    if of == entry.incarnation and tonumber(was_used) >= entry.since_ms then
      hits, used = was_hits, was_used
    end
  end
  write_counted('own', own_key, entry.replica, table.concat(
    { entry.incarnation, 'resident', medium, span, hits, used, string.format('%d', entry.number), tokens, block_hash }, ' '))
  return tonumber(span) - counted, used
end

-- A key is gone. Returns by how much owned_tokens shrinks; nil if a claim stands there. That stays: entries are in
-- order, so the request that made it computes the key again after this.
local function evict(entry, own_key, owned_tokens_key)
  local record = field_of(own_key, entry.replica)
  if record and string.find(record, '^%S+ resident ') then
    redis.call('HDEL', own_key, entry.replica)
    return counted_span(record, entry.incarnation, entry.since_ms, owned_tokens_key, entry.replica)
  end
end

-- The agent is to say everything again, unless it is asked for something already.
local function ask_again(asks_key, replica)
  if not redis.call('HGET', asks_key, replica) then
    redis.call('HSET', asks_key, replica, 'restate')
  end
end

-- The parts of a replica's record: its incarnation, state and capacity (`life`), its incarnation alone, since when that
-- counts, its floor, its URL; nil if the record cannot be read.
local function parts_of(record)
  local life, since_ms, floor, url = string.match(record or '', '^(%S+ %S+ %d+) (%d+) (%d+) (%S+)')
  return life, string.match(life or '', '^%S+'), since_ms, floor, url
end

-- Changes the map by these lines (see publish), with their own:<key>, one for each line that names a key. Returns the
-- replica's floor after them.
local function apply_transitions(entry, lines, own_keys, floor, owned_tokens_key, held_key)
  local void, owned, index = last_reset(lines), 0, 0
  local now_text = string.format('%d', math.max(now_ms(), entry.since_ms))
  local to_remove, to_hold = {}, {} -- of held, in one call each
  for i = 1, #lines do
    local what, key = string.match(lines[i], '^(%S+) ?(%S*)')
    if what == '+' or what == '-' then
      index = index + 1
    end
    if i < void then
      what = 'void'
    end
    if what == '+' then
      local grown, used = become_resident(entry, own_keys[index], lines[i], owned_tokens_key, now_text)
      owned, to_hold[key] = owned + grown, used
    elseif what == '-' then
      local shrunk = evict(entry, own_keys[index], owned_tokens_key)
      if shrunk then
        owned, to_hold[key] = owned - shrunk, nil
        to_remove[#to_remove + 1] = key
      end
    elseif what == 'reset' then
      floor = math.max(floor, entry.number)
    elseif what == 'floor' then
      floor = math.max(floor, tonumber(key))
    end
  end
  in_parts(to_remove, function(...) redis.call('ZREM', held_key, ...) end)
  local scored = {}
  for key, used in pairs(to_hold) do
    scored[#scored + 1], scored[#scored + 2] = used, key
  end
  in_parts(scored, function(...) redis.call('ZADD', held_key, 'NX', ...) end)
  if owned ~= 0 then
    add(owned_tokens_key, entry.replica, owned)
  end
  return floor
end

-- Applies an entry, and writes the floor into the replica's record if it has moved.
local function apply_entry(entry, record, floor, lines, own_keys, owned_tokens_key, held_key, replicas_key)
  local new_floor = apply_transitions(entry, lines, own_keys, tonumber(floor), owned_tokens_key, held_key)
  local life, _, since_ms, _, url = parts_of(record)
  local changed = string.format('%s %s %d %s', life, since_ms, new_floor, url)
  if changed ~= record then
    redis.call('HSET', replicas_key, entry.replica, changed)
  end
end
