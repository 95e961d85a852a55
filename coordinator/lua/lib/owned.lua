-- What an ownership record adds to its replica's owned_tokens: its span, if the record is of the current incarnation
-- and was used since that was registered. A record that cannot be read may have been counted: then the sum is marked,
-- and made again.

-- include safe

local OWNERSHIP = '^(%S+) %l+ %S+ (%d+) %d+ (%d+) %S'

local function counted_span(record, incarnation, since_ms, owned_key, replica)
  local of, span, used = string.match(record, OWNERSHIP)
  if of == nil then
    mark(owned_key, replica, 1)
    return 0
  end
  return (of == incarnation and tonumber(used) >= tonumber(since_ms)) and tonumber(span) or 0
end
