-- A hash as a table; empty if the key is no hash.
local function pairs_of(key)
  local flat, map = redis.pcall('HGETALL', key), {}
  for i = 1, #flat, 2 do
    map[flat[i]] = flat[i + 1]
  end
  return map
end

-- The words of a text, as the keys of a table.
local function set_of(names)
  local set = {}
  for name in string.gmatch(names, '%S+') do
    set[name] = true
  end
  return set
end
