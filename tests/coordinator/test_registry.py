"""The stored facts about a replica."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import redis.asyncio as redis

from coordinator.maintenance.held_keys import forget
from coordinator.maintenance.worker import Worker
from coordinator.placement import Reservation
from coordinator.pool.pool import Pool
from coordinator.registry import ReplicaRecord
from tests.coordinator.stage import (
    KEYS,
    chain,
    drained,
    dump,
    hash_of,
    joined,
    now_ms,
    numbers,
    owners,
    place,
    register,
    replica,
)
from tests.coordinator.stream import Stream, attend, gains, linked
from tests.redis_server import RedisServer


async def record_of(client: redis.Redis, name: str) -> ReplicaRecord:
    return ReplicaRecord.parse(name, (await hash_of(client, KEYS.replicas))[name])


async def test_a_new_replica_starts_with_no_load_and_owns_nothing(pool: Pool, client: redis.Redis) -> None:
    before = await now_ms(client)
    assert await pool.register(replica("r0", capacity_tokens=500)) == b"new"
    record = await record_of(client, "r0")
    assert (record.incarnation, record.state, record.capacity_tokens) == ("life1", "ready", 500)
    assert record.url == "http://r0.test:8000"
    assert before <= record.since_ms <= await now_ms(client)
    for key in (KEYS.active, KEYS.backlog_tokens, KEYS.owned_tokens):
        assert await hash_of(client, key) == {"r0": "0"}


async def test_registering_the_same_again_changes_nothing(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(1))
    record = await record_of(client, "r0")
    assert await pool.register(replica("r0")) == b"same"
    assert await record_of(client, "r0") == record
    assert await numbers(client, KEYS.active) == {"r0": 1}


async def test_a_correction_keeps_life_load_and_ownership(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(1))
    since_ms = (await record_of(client, "r0")).since_ms
    assert await pool.register(replica("r0", state="dead", capacity_tokens=900)) == b"changed"
    record = await record_of(client, "r0")
    assert (record.state, record.capacity_tokens, record.since_ms) == ("dead", 900, since_ms)
    assert await numbers(client, KEYS.active) == {"r0": 1}
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}


async def test_a_state_changes_where_it_is_still_as_it_was_seen_and_all_else_stays(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(1))
    before = await record_of(client, "r0")
    for stale in (("r0", "life0", "ready"), ("r0", "life1", "dead"), ("r9", "life1", "ready")):
        pool.change_state(*stale, "hung")
    await drained(pool)
    assert await record_of(client, "r0") == before
    pool.change_state("r0", "life1", "ready", "hung")
    await drained(pool)
    assert await record_of(client, "r0") == replace(before, state="hung")
    assert list(await hash_of(client, KEYS.replicas)) == ["r0"]
    assert await numbers(client, KEYS.active) == {"r0": 1}


async def test_a_replica_that_hangs_is_chosen_by_nobody_who_has_another(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    pool.change_state("r0", "life1", "ready", "hung")
    assert {(await place(pool, f"p{number}", chain(number))).replica for number in range(8)} == {"r1"}


async def test_a_new_life_loses_load_ownership_and_breaker(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    for name in ("r0", "r1"):
        await place(pool, name, chain(name), pinned=name)
        await client.hset(KEYS.breakers, name, "3 99 0")
    assert await pool.register(replica("r0", "life2")) == b"new"
    for key in (KEYS.active, KEYS.backlog_tokens, KEYS.owned_tokens):
        assert list(await numbers(client, key)) == ["r1"]
    assert list(await hash_of(client, KEYS.breakers)) == ["r1"]


async def test_only_if_absent_never_overwrites(pool: Pool, client: redis.Redis) -> None:
    assert await pool.register(replica("r0"), only_if_absent=True) == b"new"
    assert await pool.register(replica("r0", "life2"), only_if_absent=True) == b"same"
    assert (await record_of(client, "r0")).incarnation == "life1"


async def test_lives_that_are_only_counted_are_compared_as_numbers(pool: Pool) -> None:
    for life, outcome in (("life-9", b"new"), ("life-10", b"new"), ("life-9", b"same"), ("life-10", b"same")):
        assert await pool.register(replica("r0", life), only_if_absent=True) == outcome


async def test_every_life_of_a_replica_begins_later_than_the_one_before(pool: Pool, client: redis.Redis) -> None:
    begun = []
    for i in range(20):
        pool.register(replica("r0", f"life{i % 2}"))
        await drained(pool)
        begun.append((await record_of(client, "r0")).since_ms)
    assert begun == sorted(set(begun))


async def forgotten(pool: Pool) -> bool:
    fleet = await pool.beat()
    return await forget(pool, fleet.replicas["r0"])


async def test_of_a_dead_replica_that_is_forgotten_nothing_is_left(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    async with linked(redis_server.url) as link, joined(redis_server.url, "gw1") as other:
        await attend(link, counters={"prefills": 1.0})
        await place(pool, "a", chain(1, 2))
        stream = Stream(link)
        await stream.say(*gains(chain(1, 2)))
        pool.done("a")
        pool.report("r0", "life1", "failure")
        await pool.register(replica("r0", state="dead"))
        await other.beat()
        assert not await forgotten(pool), "its agent lives"
        await attend(link, leaving=True)
        assert await forgotten(pool)
        assert list(await owners(client, chain(1)[0])) == ["r0"], "which means nothing without a record of the replica"
        await Worker(other).tick()
        await other.beat()
        # until the next turn; while a gateway uses the subset; gateways that beat later must still hear that it is gone
        kept = (KEYS.bound, KEYS.subset(""), KEYS.view_changes)
        left = {key: value for key, value in (await dump(client)).items() if not key.startswith(kept)}
        assert "r0" not in str(left)
        for gateway in (pool, other):
            await gateway.beat()
            assert gateway.records == {}
            gateway.reassert()
            await drained(gateway)
        assert await hash_of(client, KEYS.replicas) == {}


async def test_a_replica_that_lives_or_lives_again_is_not_forgotten(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    assert not await forgotten(pool)
    dead = (await pool.beat()).replicas["r0"]
    await pool.register(replica("r0", "life2", state="dead"))
    assert not await forget(pool, dead)
    assert (await record_of(client, "r0")).incarnation == "life2"


async def test_a_replica_that_comes_back_before_its_old_keys_are_removed_keeps_its_new_ones(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await place(pool, "a", chain("old"))
    pool.done("a")
    await pool.register(replica("r0", state="dead"))
    await drained(pool)
    assert await forgotten(pool)
    await client.zadd(KEYS.held("r0"), {chain("old")[0]: await now_ms(client) - 1000})
    await register(pool, 1)
    await place(pool, "b", chain("new"))
    await drained(pool)
    for _ in range(2):
        await Worker(pool).tick()
    assert await client.zrange(KEYS.held("r0"), 0, -1) == chain("new")
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}
    assert not await client.exists(KEYS.forgotten)


async def test_of_a_replica_that_is_kept_nothing_is_dropped(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    async with linked(redis_server.url) as link:
        await attend(link)
        stream = Stream(link)
        await stream.say(*gains(chain(1)))
        await pool.register(replica("r0", state="dead"))
        assert not await forgotten(pool), "its agent lives"
        assert list(await owners(client, chain(1)[0])) == ["r0"]
        await attend(link, leaving=True)
        dead = (await pool.beat()).replicas["r0"]
        await pool.register(replica("r0", "life2"))
        await place(pool, "a", chain(1, 2))
        await drained(pool)
        assert not await forget(pool, dead), "it lives again"
        assert list(await owners(client, chain(1, 2)[1])) == ["r0"]


async def test_a_store_that_lost_everything_has_forgotten_nobody(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    await pool.beat()
    await client.flushall()
    beating = asyncio.get_running_loop().create_task(pool.beat())
    await asyncio.sleep(0)
    pool.adopt(Reservation("late", "r0", "life1", 10, "-"))
    pool.reservations.count_adopted()  # raises the epoch while the reply is under way
    assert not (await beating).known
    assert sorted(pool.records) == ["r0", "r1"]
