-- Writes records of operators: all of them, or none if the store has another text of any than its writer has seen.
--
-- KEYS
--   hash    records
--   stream  audit
-- ARGV
--   text    mark: a random one for the field `#`, by which gateways see that something has changed
--   text    who: who changes something; "": a gateway writes what the store has lost, which is not told in `audit`
--   text    what: the change, in a word
--   text    subject: what is changed
--   text    tenant: whose it is
--   number  most_audited
--   text    changes(field, seen, text)...: `seen` is the text in the store ("": there is none). Without a text the
--             field is removed.
-- Returns 1, or 0 if nothing was written.

-- include safe

for i = CHANGES_OFFSET + 1, #ARGV, CHANGES_SIZE do
  if (field_of(records_key, ARGV[i]) or '') ~= ARGV[i + 1] then
    return 0
  end
end
write('HSET', records_key, '#', mark)
for i = CHANGES_OFFSET + 1, #ARGV, CHANGES_SIZE do
  if ARGV[i + 2] == '' then
    redis.call('HDEL', records_key, ARGV[i])
  else
    redis.call('HSET', records_key, ARGV[i], ARGV[i + 2])
  end
end
if who ~= '' then
  local limit = string.format('%d', most_audited)
  write('XADD', audit_key, 'MAXLEN', '~', limit, '*', 'who', who, 'what', what, 'subject', subject, 'tenant', tenant)
end
return 1
