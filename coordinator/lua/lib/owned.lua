-- What an ownership record adds to its replica's owned_tokens: its span, where it is of the current life and was used
-- since that began.
local function counted_span(record, incarnation, since_ms)
  local of, span, used = string.match(record, '^(%S+) %S+ %S+ (%S+) %S+ (%S+)')
  return (of == incarnation and tonumber(used) >= tonumber(since_ms)) and tonumber(span) or 0
end
