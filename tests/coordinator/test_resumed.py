"""Streams that broke come back one by one if many broke together, over all gateways."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.pool.pool import Pool
from coordinator.pool.resumed import turn_s
from tests.coordinator.queueing import two_gateways
from tests.coordinator.stage import KEYS
from tests.redis_server import RedisServer


async def test_a_few_streams_go_on_at_once_and_the_others_in_turn(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as gateways:
        waits = [await turn_s(gateways[number % 2].run) for number in range(28)]
    assert waits[:8] == [0] * 8
    assert 0.9 < waits[-1] <= 2, "ten a second"


async def test_a_third_of_many_requests_goes_on_at_once(pool: Pool, client: redis.Redis) -> None:
    await client.hset(KEYS.active, mapping={"r0": 200, "r1": 100, "r2": "garbage"})
    waits = [await turn_s(pool.run) for _ in range(150)]
    assert waits[:100] == [0] * 100
    assert 0.5 < waits[-1] <= 1, "fifty a second"


async def test_whatever_the_key_holds_a_stream_goes_on(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, _):
        for garbage in ("garbage", "9e99", "-1", "nan"):
            await client.set(KEYS.resumptions, garbage)
            assert await turn_s(one.run) == 0
        await client.set(KEYS.resumptions, 10**14)
        assert await turn_s(one.run) <= 60
        await client.delete(KEYS.resumptions)
        await client.hset(KEYS.resumptions, "a", "b")
        assert await turn_s(one.run) == 0
