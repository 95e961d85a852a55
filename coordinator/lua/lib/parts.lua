-- Calls a function with these values, an even number of them at a time: a Lua call takes no more than some thousands.
local AT_ONCE = 1000

local function in_parts(values, call)
  for first = 1, #values, AT_ONCE do
    call(unpack(values, first, math.min(first + AT_ONCE - 1, #values)))
  end
end
