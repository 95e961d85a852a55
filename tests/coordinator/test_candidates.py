"""The candidates of `place`: which replicas it leaves out because they were tried, are dead or broken, have restarted,
or because another replica is pinned."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.pool.pool import Pool
from tests.coordinator.stage import (
    KEYS,
    chain,
    hash_of,
    now_ms,
    numbers,
    own,
    place,
    register,
    replica,
    request,
)


async def test_replicas_that_were_tried_are_left_out_even_when_they_own_the_prompt(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 3)
    keys = chain(1, 2)
    await own(client, keys[1], "r0")
    for seed in range(10):
        placed = await place(pool, "a", keys, tried=("r0", "r2"), seed=seed)
        assert placed.replica == "r1"


async def test_a_tried_name_excludes_no_name_that_contains_it(pool: Pool) -> None:
    pool.register(replica("r1"))
    pool.register(replica("r11"))
    assert (await place(pool, "a", chain(1), tried=("r1",))).replica == "r11"
    assert (await place(pool, "b", chain(1), tried=("r11",))).replica == "r1"


async def test_nobody_is_left_when_all_were_tried(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    await place(pool, "first", chain(1))
    assert await pool.place(request("second", chain(1), tried=("r0", "r1"), release="first")) is None
    assert await hash_of(client, KEYS.flight("gw0")) == {}
    assert await numbers(client, KEYS.active) == {}
    assert pool.live == {}


async def test_nobody_is_there_in_a_pool_without_replicas(pool: Pool) -> None:
    assert await pool.place(request("a", chain(1))) is None


async def test_a_retry_gives_the_failed_attempt_back_in_the_same_step(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    first = await place(pool, "first", chain(1, 2, 3))
    second = await place(pool, "second", chain(1, 2, 3), tried=(first.replica,), release="first")
    assert second.replica != first.replica
    assert await numbers(client, KEYS.active) == {second.replica: 1}
    assert await numbers(client, KEYS.backlog_tokens) == {second.replica: 300}
    assert list(await hash_of(client, KEYS.flight("gw0"))) == ["second"]
    assert list(pool.live) == ["second"]


async def test_a_pinned_request_goes_nowhere_else(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 3)
    keys = chain(1, 2)
    await own(client, keys[1], "r0")
    placed = await place(pool, "a", keys, pinned="r2")
    assert (placed.replica, placed.why) == ("r2", "pinned")
    assert await pool.place(request("b", keys, pinned="r2", tried=("r2",))) is None
    assert await pool.place(request("c", keys, pinned="unknown")) is None


async def test_a_probe_that_never_tells_is_followed_by_another(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    await client.hset(KEYS.active, "r1", 5)
    await client.hset(KEYS.breakers, "r0", f"3 {await now_ms(client) - 1} 1")
    assert (await place(pool, "probe", chain(1))).replica == "r0"


async def test_a_ready_replica_with_an_open_breaker_is_tried_before_a_dead_one(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 3)
    pool.register(replica("r0", state="dead"))
    pool.register(replica("r2", state="dead"))
    keys = chain(1)
    await own(client, keys[0], "r0")
    await client.hset(KEYS.breakers, "r1", f"3 {await now_ms(client) + 60_000} 0")
    for seed in range(5):
        placed = await place(pool, f"id{seed}", keys, seed=seed)
        assert (placed.replica, placed.why) == ("r1", "last_resort")
    placed = await place(pool, "retry", keys, tried=("r1",))
    assert (placed.replica, placed.why) == ("r0", "last_resort")
