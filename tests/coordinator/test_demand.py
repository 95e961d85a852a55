"""What a pool is asked for: requests and tokens that run and wait, over all gateways."""

from __future__ import annotations

import asyncio

import redis.asyncio as redis

from coordinator.pool.demand import Held, read_demand
from coordinator.pool.draining import drain
from coordinator.pool.pool import Pool
from tests.coordinator.queueing import asking, fill, queued, two_gateways
from tests.coordinator.stage import KEYS, SPAN_TOKENS, beaten, chain, drained, joined, register, replica
from tests.polling import eventually
from tests.redis_server import RedisServer


async def test_it_counts_what_runs_and_waits_on_all_gateways(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        full = await fill(one)
        await client.hset(KEYS.rates, "r0", 500)
        tasks = [
            await queued(client, one, asking("w0", keys=chain("w0", 1), band=1)),
            await queued(client, other, asking("w1", keys=chain("w1", 1, 2), band=0)),
        ]
        demand = await read_demand(one.run, 250.0)
        assert (demand.ready_replicas, demand.running_requests, demand.running_tokens) == (3, 3, 3 * SPAN_TOKENS)
        assert (demand.waiting_requests, demand.waiting_tokens) == (2, 5 * SPAN_TOKENS)
        assert demand.prefill_tokens_per_s == 500 + 2 * 250
        assert demand.work_s == 8 * SPAN_TOKENS / 1000
        assert sorted((line.band, line.requests, line.tokens) for line in demand.lines) == [
            (0, 1, 3 * SPAN_TOKENS),
            (1, 1, 2 * SPAN_TOKENS),
        ]
        assert 0 <= demand.oldest_wait_s < 60
        gone = await queued(client, other, asking("gone", keys=chain("gone"), band=0))
        assert (await read_demand(one.run, 250.0)).waiting_tokens == 6 * SPAN_TOKENS
        gone.cancel()
        await eventually(lambda: waits_for(one, 5 * SPAN_TOKENS))
        tasks[0].cancel()
        one.first_token(full[0])
        one.done(full[0])
        async with asyncio.timeout(5):
            await tasks[1]
        await drained(one, other)
        demand = await read_demand(other.run, 250.0)
        assert (demand.waiting_requests, demand.waiting_tokens) == (0, 0)
        assert (demand.running_requests, demand.running_tokens) == (3, 5 * SPAN_TOKENS)
        assert await client.exists(KEYS.waiting_tokens) == 0


async def waits_for(pool: Pool, tokens: int) -> bool:
    return (await read_demand(pool.run, 250.0)).waiting_tokens == tokens


async def test_drained_and_dead_replicas_are_no_capacity(pool: Pool) -> None:
    await register(pool, 4)
    await drain(pool.run, "r0")
    await pool.register(replica("r1", state="dead"))
    demand = await read_demand(pool.run, 100.0)
    assert (demand.ready_replicas, demand.draining_replicas, demand.prefill_tokens_per_s) == (2, 1, 200)


async def test_without_any_replica_the_held_requests_of_live_gateways_are_the_demand(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with joined(redis_server.url) as one, joined(redis_server.url, "gw1") as other:
        one.held, other.held = Held(2, 300), Held(1, 50)
        await beaten(one)
        await beaten(other)
        demand = await read_demand(one.run, 100.0)
        assert (demand.waiting_requests, demand.waiting_tokens, demand.work_s) == (3, 350, None)
        epoch = (await client.hget(KEYS.gateways, "gw1")).split(" ")[0]
        await client.hset(KEYS.gateways, "gw1", f"{epoch} 1")
        assert (await read_demand(one.run, 100.0)).waiting_requests == 2
        one.held = Held()
        await one.beat()
        await other.beat(leaving=True)
        assert await client.exists(KEYS.holds) == 0
