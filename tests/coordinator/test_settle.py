"""Reserved load is given back once, however many gateways report the end and however often."""

from __future__ import annotations

import asyncio

import redis.asyncio as redis

from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, calls_of, chain, drained, hash_of, joined, numbers, place, register, replica
from tests.polling import eventually
from tests.redis_server import RedisServer


async def test_the_first_token_gives_the_backlog_back_and_the_end_the_request(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(1, 2))
    pool.first_token("a")
    await drained(pool)
    assert await numbers(client, KEYS.backlog_tokens) == {}
    assert await numbers(client, KEYS.active) == {"r0": 1}
    assert (await hash_of(client, KEYS.flight("gw0")))["a"].split(" ")[3] == "0"
    pool.done("a")
    await drained(pool)
    assert await numbers(client, KEYS.active) == {}
    assert await hash_of(client, KEYS.flight("gw0")) == {}
    assert pool.live == {}


async def test_settling_twice_changes_nothing_more(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(1))
    await place(pool, "b", chain(2))
    for _ in range(2):
        pool.first_token("a")
        pool.done("a")
        pool.reservations._settle("done", "a", alone=False)
        pool.reservations._settle("first_token", "a", alone=False)
        await drained(pool)
    assert await numbers(client, KEYS.active) == {"r0": 1}
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 100}


async def test_another_gateways_reservation_of_the_same_name_is_left_alone(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    await register(pool, 1)
    async with joined(redis_server.url, "gw1") as other:
        await place(pool, "a", chain(1))
        await place(other, "a", chain(1))
        other.done("a")
        await drained(other)
    assert list(await hash_of(client, KEYS.flight("gw0"))) == ["a"]
    assert await numbers(client, KEYS.active) == {"r0": 1}


async def test_what_a_former_life_was_given_died_with_it(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "old", chain(1))
    pool.register(replica("r0", "life2"))
    await place(pool, "new", chain(2))
    pool.first_token("old")
    pool.done("old")
    await drained(pool)
    assert await numbers(client, KEYS.active) == {"r0": 1}
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 100}


async def test_load_never_goes_below_zero_when_an_incarnation_comes_back(pool: Pool, client: redis.Redis) -> None:
    """life1 → life2 → life1: the sums started again at zero, so earlier reservations must not be subtracted from
    them."""
    await register(pool, 1)
    await place(pool, "before", chain(1))
    pool.register(replica("r0", "life2"))
    pool.register(replica("r0", "life1"))
    await place(pool, "after", chain(2))
    pool.done("before")
    await drained(pool)
    assert await hash_of(client, KEYS.active) == {"r0": "1"}
    pool.done("after")
    await drained(pool)
    assert await hash_of(client, KEYS.active) == {"r0": "0"}
    assert await hash_of(client, KEYS.backlog_tokens) == {"r0": "0"}


async def test_what_ends_in_one_turn_is_settled_in_one_call(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    for i in range(20):
        await place(pool, f"id{i}", chain(i))
    await drained(pool)
    await client.config_resetstat()
    for i in range(20):
        pool.first_token(f"id{i}")
        pool.done(f"id{i}")
    await drained(pool)
    assert (await calls_of(client))["evalsha"] == 1
    assert await numbers(client, KEYS.active) == {}


async def test_first_tokens_wait_for_company_and_an_end_takes_them_along_at_once(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    for i in range(3):
        await place(pool, f"id{i}", chain(i))
    await drained(pool)
    await client.config_resetstat()
    for i in range(2):
        pool.first_token(f"id{i}")
        await asyncio.sleep(0)
    assert len(pool.settlements._settled) == 2, "they wait"
    pool.done("id2")
    await asyncio.sleep(0)
    assert not pool.settlements._settled, "they have left"
    await drained(pool)
    assert (await calls_of(client))["evalsha"] == 1
    assert await numbers(client, KEYS.backlog_tokens) == {}


async def test_a_first_token_alone_is_settled_too(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(1))
    pool.first_token("a")

    async def is_settled() -> bool:
        return await numbers(client, KEYS.backlog_tokens) == {}

    await eventually(is_settled)
