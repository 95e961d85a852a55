-- A gateway's heartbeat. It renews the gateway's lease, returns the state of the pool, and names the gateways to reap.
-- Time in which the store itself did not serve never counts against a lease: if the last tick of any gateway is more
-- than max_gap_ms ago, every gateway's lease is first extended by the gap. If the last tick lies more than max_gap_ms
-- in the future, the clock went back, and every expiry moves back by the same time. No lease ever lasts longer than if
-- it were renewed now.
--
-- KEYS
--   hash    gateways, leases, replicas, breakers, active, agents, engines, reaped
-- ARGV
--   text    gateway, epoch
--   number  lease_ms, max_gap_ms
--   flag    leaving: the gateway gives its leases up
--   flag    does_chores: false for a coordinator that stands alone, which cannot check replicas' health
-- Returns {status, expired gateways, replicas (flat pairs), breakers (flat pairs), worker, now_ms, active (flat pairs),
-- agents (flat pairs), engines (flat pairs), leases (flat pairs), number of reservations in reaped}. `status` is "ok",
-- or "stale" if this gateway's lease or epoch is not known: then it must reassert. `worker` is the gateway that holds
-- the lease on the pool's chores (health checks, trimming).

local HOUR_MS = 3600000

-- include time
-- include expiries

local now = now_ms()
local now_text = string.format('%d', now)

local last_tick = tonumber(redis.call('HGET', leases_key, 'tick') or now) or now
local gap = now - last_tick
local jumped_ms = gap > max_gap_ms and gap or 0
local back_ms = -gap > max_gap_ms and -gap or 0
if jumped_ms > 0 then -- jumps of one hour count together: keys may go unused for an hour
  local at_ms, by_ms = string.match(redis.call('HGET', leases_key, 'jumped') or '', '^(%d+) (%d+)')
  local ago_ms = last_tick - tonumber(at_ms or 0)
  local before_ms = ago_ms >= 0 and ago_ms < HOUR_MS and tonumber(by_ms) or 0
  redis.call('HSET', leases_key, 'jumped', now_text .. ' ' .. string.format('%d', before_ms + jumped_ms))
end
if back_ms > 0 then
  redis.call('HSET', leases_key, 'went_back', now_text .. ' ' .. string.format('%d', back_ms))
end

local gateways, agents = redis.call('HGETALL', gateways_key), redis.call('HGETALL', agents_key)
local leases, breakers = redis.call('HGETALL', leases_key), redis.call('HGETALL', breakers_key)
local latest_ms = now + lease_ms
keep_in_time(gateways_key, gateways, '^(%d+ )(%d+)(.*)', back_ms, latest_ms, latest_ms)
keep_in_time(agents_key, agents, '^(%S+ %S+ )(%d+)( .*)', back_ms, latest_ms, latest_ms)
for i = 1, #leases, 2 do
  local names_holder = leases[i] == 'worker' or string.match(leases[i], '^events:')
  if names_holder or string.match(leases[i], '^applier:') then
    local pattern = names_holder and '^(%S+ )(%d+)(.*)' or '^(%s*)(%d+)(.*)'
    keep_in_time(leases_key, { leases[i], leases[i + 1] }, pattern, back_ms, latest_ms, latest_ms)
  end
end
if back_ms > 0 then
  keep_in_time(breakers_key, breakers, '^(%d+ )(%d+)(.*)', back_ms, now, math.huge)
end

local expired = {}
local status = 'stale'
for i = 1, #gateways, 2 do
  local known_epoch, until_ms = string.match(gateways[i + 1], '^(%d+) (%d+)')
  until_ms = tonumber(until_ms)
  if jumped_ms > 0 and until_ms and known_epoch ~= '0' then
    until_ms = until_ms + jumped_ms
    redis.call('HSET', gateways_key, gateways[i], known_epoch .. ' ' .. string.format('%d', until_ms))
  end
  if gateways[i] == gateway then
    if known_epoch == epoch then
      status = 'ok'
      if not leaving then
        redis.call('HSET', gateways_key, gateway, epoch .. ' ' .. string.format('%d', now + lease_ms))
      else
        redis.call('HDEL', gateways_key, gateway)
      end
    end
  elseif until_ms and (until_ms < now or known_epoch == '0') then -- repair.lua mends a record that cannot be read
    expired[#expired + 1] = gateways[i]
  end
end
redis.call('HSET', leases_key, 'tick', now_text)

-- One gateway at a time does the pool's chores; its lease is renewed by its own beats.
local worker, worker_until = string.match(redis.call('HGET', leases_key, 'worker') or '', '^(%S+) (%d+)')
if does_chores and (worker == nil or worker == gateway or tonumber(worker_until) < now) then
  worker = gateway
  if not leaving then
    redis.call('HSET', leases_key, 'worker', worker .. ' ' .. string.format('%d', now + lease_ms))
  else
    redis.call('HDEL', leases_key, 'worker')
  end
end

return {
  status, expired, redis.call('HGETALL', replicas_key), breakers, worker or '', now,
  redis.call('HGETALL', active_key), agents, redis.call('HGETALL', engines_key),
  redis.call('HGETALL', leases_key), redis.call('HLEN', reaped_key),
}
