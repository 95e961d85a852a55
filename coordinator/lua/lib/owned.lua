-- What an ownership record adds to its replica's owned_tokens: its span, if the record is of the current incarnation
-- and was used since that counts. A record that cannot be read may have been counted: then maintenance voids what the
-- replica owns (see repair).

-- include safe

local function parts_of_ownership(record)
  local of, span, used = string.match(record, '^(%S+) %l+ %S+ (%d+) %d+ (%d+) %S')
  if of and is_number(span) then
    return of, tonumber(span), tonumber(used)
  end
end

local function counted_span(record, incarnation, since_ms, owned_key, replica)
  local of, span, used = parts_of_ownership(record)
  if of == nil then
    tell(owned_key, 'own', replica)
    return 0
  end
  return (of == incarnation and used >= tonumber(since_ms)) and span or 0
end
