-- The replica's agent counts if it is live and watches the current incarnation. While it relearns, requests whose prefix
-- it may not know ask the engine to report it: not too many, and not while the engine has requests waiting.
local REPORT_MS = 100
local BIND_TTL_MS = 60000 -- chains are kept for one to two of these: longer than a request waits for its first token
local agent_of, until_ms, agent_mode, relearning, waiting = string.match(
  field_of(agents_key, replica) or '', '^%S+ (%S+) (%d+) (%S+) (%d) (%d+)')
if agent_of == incarnation and agent_mode ~= 'none' and tonumber(until_ms) >= now then
  mode = agent_mode
  if may_report and relearning == '1' and waiting == '0' and (claimed_from > 0 or kind == 'claim') then
    local asked_ms = tonumber(field_of(reports_key, replica) or 0) or 0
    if asked_ms > now or now - asked_ms >= REPORT_MS then
      report = 1
      write('HSET', reports_key, replica, string.format('%d', now))
    end
  end
end
if claimed_from > 0 or report == 1 then
  local text = table.concat({ replica, incarnation, report, prompt_tokens, shape, chain }, ' ')
  write_down(bound_key, now, BIND_TTL_MS, tip, text)
end
