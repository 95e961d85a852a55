"""Maintenance: no replica is believed to hold more than its cache can."""

from __future__ import annotations

import pytest
import redis.asyncio as redis
from structlog.testing import capture_logs

from coordinator.maintenance import held_keys, worker
from coordinator.maintenance.held_keys import AGENT_RETURNS_MS, CLAIM_TTL_MS, forget_older
from coordinator.maintenance.worker import Worker
from coordinator.pool.pool import Pool
from coordinator.registry import PoolState
from tests.coordinator.stage import (
    KEYS,
    chain,
    drained,
    joined,
    now_ms,
    numbers,
    owners,
    place,
    register,
    replica,
    trim,
)
from tests.coordinator.stream import followed
from tests.redis_server import RedisServer


async def fill(pool: Pool, client: redis.Redis, prompts: int, keys_each: int, name: str = "r0") -> list[list[str]]:
    """Places prompts on a replica one after the other. In the store their uses are 1 s apart."""
    now, chains = await now_ms(client), [chain("prompt", i, *range(keys_each - 2)) for i in range(prompts)]
    for i, keys in enumerate(chains):
        await place(pool, f"fill{i}", keys[:], pinned=name)
        pool.done(f"fill{i}")
        await drained(pool)
        scores = {key: now - 1000 * (prompts - i) + (keys_each - j) / 1000 for j, key in enumerate(keys)}
        await client.zadd(KEYS.held(name), scores)
    return chains


async def trimmed(pool: Pool, name: str = "r0") -> int:
    fleet: PoolState = await pool.beat()
    return await trim(pool, fleet.replicas[name], fleet)


async def start_of_life(client: redis.Redis, name: str, ago_ms: int) -> None:
    """Moves the replica's start into the past."""
    incarnation, state, capacity, since, floor, url = (await client.hget(KEYS.replicas, name)).split(" ")
    begun = int(since) - ago_ms
    await client.hset(KEYS.replicas, name, f"{incarnation} {state} {capacity} {begun} {floor} {url}")


async def test_what_exceeds_the_cache_goes_least_recently_used_first_and_little_else(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1, capacity_tokens=300_000)
    await start_of_life(client, "r0", 3_000_000)
    chains = await fill(pool, client, 400, 10)
    owned = (await numbers(client, KEYS.owned_tokens))["r0"]
    assert owned > 300_000
    dropped = await trimmed(pool)
    left = (await numbers(client, KEYS.owned_tokens))["r0"]
    assert owned - left == dropped * 100
    assert 295_000 <= left <= 300_000
    assert [list(await owners(client, key)) for key in chains[-1]] == [["r0"]] * 10
    assert [list(await owners(client, key)) for key in chains[0][2:]] == [[]] * 8


async def test_a_small_cache_is_not_emptied_for_a_small_excess(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1, capacity_tokens=9_500)
    await start_of_life(client, "r0", 60_000)
    await fill(pool, client, 5, 20)
    dropped = await trimmed(pool)
    assert 1 <= dropped <= 3
    assert 9_300 <= (await numbers(client, KEYS.owned_tokens))["r0"] <= 9_500


async def test_trimming_a_prompt_leaves_its_beginning(pool: Pool, client: redis.Redis) -> None:
    """A holder of a prefix must hold everything before it, because the search relies on that."""
    await register(pool, 1, capacity_tokens=1_200)
    keys = chain(*range(20))
    await place(pool, "a", keys)
    await drained(pool)
    await start_of_life(client, "r0", 60_000)
    await trimmed(pool)
    owned = [bool(await owners(client, key)) for key in keys]
    assert owned == [True] * 12 + [False] * 8


async def test_where_the_capacity_is_unknown_the_number_of_keys_is_bounded(
    pool: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_keys, "MAX_KEYS", 30)
    await register(pool, 1)
    await start_of_life(client, "r0", 60_000)
    await fill(pool, client, 5, 20)
    await trimmed(pool)
    assert await client.zcard(KEYS.held("r0")) == 30
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 3_000}


async def test_claims_that_nobody_used_for_the_ttl_are_dropped(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await start_of_life(client, "r0", 2 * CLAIM_TTL_MS)
    await place(pool, "old", chain("old", 1))
    await place(pool, "new", chain("new", 1))
    await drained(pool)
    long_ago = await now_ms(client) - CLAIM_TTL_MS - 1000
    await client.zadd(KEYS.held("r0"), dict.fromkeys(chain("old", 1), long_ago))
    assert await trimmed(pool) == 2
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
    assert sorted(await client.zrange(KEYS.held("r0"), 0, -1)) == sorted(chain("new", 1))


async def test_what_an_older_incarnation_left_behind_is_dropped_and_not_subtracted(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    old, new = chain("old", *range(299)), chain("new", 1)
    await place(pool, "a", old)
    await drained(pool)
    long_ago = await now_ms(client) - 5000
    await client.zadd(KEYS.held("r0"), dict.fromkeys(old, long_ago))
    await pool.register(replica("r0", "life2"))
    await place(pool, "b", new)
    assert await trimmed(pool) == 300
    assert await client.exists(*(KEYS.own(key) for key in old)) == 0
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}


async def test_forgetting_older_keys_spares_what_was_used_since(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    chains = await fill(pool, client, 4, 10)
    boundary = int(float(await client.zscore(KEYS.held("r0"), chains[2][-1])))
    assert await forget_older(pool, "r0", boundary) == 18
    left = set(await client.zrange(KEYS.held("r0"), 0, -1))
    assert left == {*chains[2], *chains[3]}


async def test_only_the_gateway_with_the_worker_lease_trims(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    await register(pool, 1, capacity_tokens=100)
    await place(pool, "a", chain(1, 2))
    await start_of_life(client, "r0", 60_000)
    async with joined(redis_server.url, "gw1") as other:
        await other.beat()
        idle, busy = Worker(pool), Worker(other)
        for _ in range(4):
            await idle.tick()
        assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
        for _ in range(4):
            await busy.tick()
        assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}


async def test_maintenance_that_takes_long_does_not_keep_the_next_heartbeat_waiting(
    pool: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_WORK_S", 0.05)
    monkeypatch.setattr(held_keys, "_PIECE", 1)
    await register(pool, 1)
    await place(pool, "a", chain(1))
    await client.zadd(KEYS.held("r0"), {f"{i:032x}": i for i in range(20_000)})
    maintenance = Worker(pool)
    await maintenance.tick()
    await maintenance.tick()
    assert 0 < await client.zcard(KEYS.held("r0")) < 20_001


async def test_a_tick_that_fails_on_what_nobody_thought_of_is_logged(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "beat", lambda: {}["nothing"])
    with capture_logs() as logs:
        await Worker(pool).tick()
    assert [(log["event"], log["pool"], log["error"]) for log in logs] == [("maintenance failed", "m", "KeyError")]


async def test_what_a_replica_holds_is_not_trimmed_while_its_next_agent_may_still_come(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1, capacity_tokens=100)
    await place(pool, "a", chain(1, 2))
    maintenance = Worker(pool)
    await followed(client, lease_ms=-1)
    await maintenance.tick()
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
    await followed(client, lease_ms=-AGENT_RETURNS_MS - 1)
    await maintenance.tick()
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}


async def test_a_replica_whose_agent_hears_nothing_is_trimmed(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1, capacity_tokens=100)
    await place(pool, "a", chain(1, 2))
    await followed(client, mode="none")
    await Worker(pool).tick()
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}
