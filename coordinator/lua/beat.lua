-- A gateway's heartbeat: renews its lease, tells it of the fleet, and names the gateways that have to be reaped.
-- Time in which the store itself did not serve is never counted: when the last tick of any gateway is over
-- ARGV[4] ms old, every gateway's lease is first extended by the gap.
-- When the last tick lies more than ARGV[4] ms in the future, the clock went back: what was to end moves back by as much.
-- In any case no lease lasts longer than it would if it were renewed now.
--
-- KEYS[1] gateways   KEYS[2] leases   KEYS[3] replicas   KEYS[4] breakers   KEYS[5] active   KEYS[6] agents
-- KEYS[7] engines   KEYS[8] reaped
-- ARGV[1] gateway   ARGV[2] epoch   ARGV[3] lease_ms   ARGV[4] max_gap_ms   ARGV[5] gateway that leaves ("1") or not ("0")
-- ARGV[6] whether it does chores ("1"; a coordinator that stands alone cannot check replicas' health)
-- Returns {status, expired gateways, replicas (flat pairs), breakers (flat pairs), worker, now_ms, active (flat pairs),
--          agents (flat pairs), engines (flat pairs), leases (flat pairs), reservations in reaped}
-- where status is "ok" or "stale" (this gateway's lease or epoch is not known: it must reassert), and worker is
-- the gateway that holds the lease on the pool's chores (health checks, trimming).

local HOUR_MS = 3600000

-- include time
-- include expiries

local now = now_ms()
local now_text = string.format('%d', now)
local lease_ms = tonumber(ARGV[3])

local last_tick = tonumber(redis.call('HGET', KEYS[2], 'tick') or now) or now
local gap = now - last_tick
local jumped_ms = gap > tonumber(ARGV[4]) and gap or 0
local back_ms = -gap > tonumber(ARGV[4]) and -gap or 0
if jumped_ms > 0 then -- those of an hour count together: for so long keys may rest
  local at_ms, by_ms = string.match(redis.call('HGET', KEYS[2], 'jumped') or '', '^(%d+) (%d+)')
  local ago_ms = last_tick - tonumber(at_ms or 0)
  local before_ms = ago_ms >= 0 and ago_ms < HOUR_MS and tonumber(by_ms) or 0
  redis.call('HSET', KEYS[2], 'jumped', now_text .. ' ' .. string.format('%d', before_ms + jumped_ms))
end
if back_ms > 0 then
  redis.call('HSET', KEYS[2], 'went_back', now_text .. ' ' .. string.format('%d', back_ms))
end

local gateways, agents = redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[6])
local leases, breakers = redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[4])
local latest_ms = now + lease_ms
keep_in_time(KEYS[1], gateways, '^(%d+ )(%d+)(.*)', back_ms, latest_ms, latest_ms)
keep_in_time(KEYS[6], agents, '^(%S+ %S+ )(%d+)( .*)', back_ms, latest_ms, latest_ms)
for i = 1, #leases, 2 do
  local names_who = leases[i] == 'worker' or string.match(leases[i], '^events:')
  if names_who or string.match(leases[i], '^applier:') then
    local pattern = names_who and '^(%S+ )(%d+)(.*)' or '^(%s*)(%d+)(.*)'
    keep_in_time(KEYS[2], { leases[i], leases[i + 1] }, pattern, back_ms, latest_ms, latest_ms)
  end
end
if back_ms > 0 then
  keep_in_time(KEYS[4], breakers, '^(%d+ )(%d+)(.*)', back_ms, now, math.huge)
end

local expired = {}
local status = 'stale'
for i = 1, #gateways, 2 do
  local epoch, until_ms = string.match(gateways[i + 1], '^(%d+) (%d+)')
  until_ms = tonumber(until_ms)
  if jumped_ms > 0 and until_ms and epoch ~= '0' then
    until_ms = until_ms + jumped_ms
    redis.call('HSET', KEYS[1], gateways[i], epoch .. ' ' .. string.format('%d', until_ms))
  end
  if gateways[i] == ARGV[1] then
    if epoch == ARGV[2] then
      status = 'ok'
      if ARGV[5] == '0' then
        redis.call('HSET', KEYS[1], ARGV[1], epoch .. ' ' .. string.format('%d', now + lease_ms))
      else
        redis.call('HDEL', KEYS[1], ARGV[1])
      end
    end
  elseif until_ms and (until_ms < now or epoch == '0') then -- one that cannot be read is mended: see repair
    expired[#expired + 1] = gateways[i]
  end
end
redis.call('HSET', KEYS[2], 'tick', now_text)

-- One gateway at a time does the pool's chores; its lease is renewed by its own beats.
local worker, worker_until = string.match(redis.call('HGET', KEYS[2], 'worker') or '', '^(%S+) (%d+)')
if ARGV[6] == '1' and (worker == nil or worker == ARGV[1] or tonumber(worker_until) < now) then
  worker = ARGV[1]
  if ARGV[5] == '0' then
    redis.call('HSET', KEYS[2], 'worker', worker .. ' ' .. string.format('%d', now + lease_ms))
  else
    redis.call('HDEL', KEYS[2], 'worker')
  end
end

return {
  status, expired, redis.call('HGETALL', KEYS[3]), breakers, worker or '', now,
  redis.call('HGETALL', KEYS[5]), agents, redis.call('HGETALL', KEYS[7]),
  redis.call('HGETALL', KEYS[2]), redis.call('HLEN', KEYS[8]),
}
