-- A gateway's heartbeat: renews its lease, tells it of the fleet, and names the gateways whose lease ran out.
-- Time in which the store itself did not serve is never counted: when the last tick of any gateway is over
-- ARGV[4] ms old, every lease is first extended by the gap.
--
-- KEYS[1] gateways   KEYS[2] leases   KEYS[3] replicas   KEYS[4] breakers   KEYS[5] active   KEYS[6] agents
-- KEYS[7] engines
-- ARGV[1] gateway   ARGV[2] epoch   ARGV[3] lease_ms   ARGV[4] max_gap_ms   ARGV[5] gateway that leaves ("1") or not ("0")
-- ARGV[6] whether it does chores ("1"; a coordinator that stands alone cannot check replicas' health)
-- Returns {status, expired gateways, replicas (flat pairs), breakers (flat pairs), worker, now_ms, active (flat pairs),
--          agents (flat pairs), engines (flat pairs), leases (flat pairs)}
-- where status is "ok" or "stale" (this gateway's lease or epoch is not known: it must reassert), and worker is
-- the gateway that holds the lease on the pool's chores (health checks, trimming).

-- include time

local now = now_ms()
local lease_ms = tonumber(ARGV[3])

local last_tick = tonumber(redis.call('HGET', KEYS[2], 'tick') or now)
local gap = now - last_tick
local gateways = redis.call('HGETALL', KEYS[1])
local expired = {}
local status = 'stale'
for i = 1, #gateways, 2 do
  local epoch, until_ms = string.match(gateways[i + 1], '^(%d+) (%d+)')
  until_ms = tonumber(until_ms)
  if gap > tonumber(ARGV[4]) then
    until_ms = until_ms + gap
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
  elseif until_ms < now then
    expired[#expired + 1] = gateways[i]
  end
end
redis.call('HSET', KEYS[2], 'tick', string.format('%d', now))

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
  status, expired, redis.call('HGETALL', KEYS[3]), redis.call('HGETALL', KEYS[4]), worker or '', now,
  redis.call('HGETALL', KEYS[5]), redis.call('HGETALL', KEYS[6]), redis.call('HGETALL', KEYS[7]),
  redis.call('HGETALL', KEYS[2]),
}
