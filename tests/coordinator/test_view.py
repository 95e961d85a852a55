"""What heartbeats tell of a pool: what has changed since the gateway's last one, whoever changed it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreDown
from coordinator.pool.pool import LEASE_MS, MAX_GAP_MS, Pool
from coordinator.registry import PoolState, ReplicaFigures
from tests.coordinator.stage import (
    KEYS,
    calls_of,
    chain,
    drained,
    dump,
    hash_of,
    joined,
    now_ms,
    place,
    register,
    replica,
)
from tests.coordinator.stream import attend, followed, linked
from tests.polling import eventually
from tests.redis_server import RedisServer

MANY = 2500
"""So many replicas that heartbeats share a look for a second."""


@pytest.fixture
async def other(redis_server: RedisServer, client: redis.Redis) -> AsyncIterator[Pool]:
    async with joined(redis_server.url, "gw1") as pool:
        yield pool


async def told(pool: Pool) -> tuple[int, dict[bytes, bytes]]:
    """A heartbeat's answer: whether it tells all replicas, and the lines of those that it tells."""
    reply = await pool.run(
        "beat",
        gateway=pool.gateway,
        epoch=pool.link.epoch,
        lease_ms=LEASE_MS,
        max_gap_ms=MAX_GAP_MS,
        leaving=False,
        does_maintenance=True,
        version=pool._version,
        held="",
        has_written=False,
    )
    return reply[7], dict(zip(reply[8][::2], reply[8][1::2], strict=True))


async def known_everywhere(*pools: Pool) -> list[PoolState]:
    return [await pool.beat() for pool in pools]


async def large(client: redis.Redis) -> None:
    """Registers many replicas at once."""
    since_ms = await now_ms(client)
    records = {f"many{i}": f"life1 ready 0 {since_ms} 0 http://many{i}.test:8000" for i in range(MANY)}
    await client.hset(KEYS.replicas, mapping=records)


async def test_while_nothing_changes_but_leases_and_counters_heartbeats_tell_no_replica(
    pool: Pool, redis_server: RedisServer
) -> None:
    await register(pool, 2)
    async with linked(redis_server.url) as link:
        await attend(link, counters={"prefills": 1.0})
        assert (await pool.beat()).is_exact("r0")
        await attend(link, counters={"prefills": 2.0}, waiting=7, seq=9)
        assert await told(pool) == (0, {})
        assert (await pool.beat()).is_exact("r0")


async def test_that_a_lease_lapsed_is_told_although_nobody_wrote_anything(
    pool: Pool, other: Pool, client: redis.Redis
) -> None:
    await register(pool, 2)
    for name in ("r0", "r1"):
        await followed(client, name, lease_ms=2000)
    assert all(state.is_exact("r0") for state in await known_everywhere(pool, other))
    lapsed_ms = await now_ms(client) - 1
    await client.hset(KEYS.agents, "r0", f"agent0 life1 {lapsed_ms} session 0 0 -1")
    for state in await known_everywhere(pool, other):
        assert (state.is_exact("r0"), state.is_exact("r1")) == (False, True)
        assert state.followed_until_ms("r0") == lapsed_ms
    assert await told(pool) == (0, {})


async def test_what_other_versions_write_without_raising_a_version_is_told(
    pool: Pool, other: Pool, client: redis.Redis
) -> None:
    await register(pool, 2)
    await known_everywhere(pool, other)
    await client.hset(KEYS.replicas, "r2", replica("r2", "life7").text)
    await client.hset(KEYS.breakers, "r1", "3 77 0")
    await client.hset(KEYS.replicas, "r1", replica("r1", state="hung").text)
    await client.hdel(KEYS.replicas, "r0")
    for state in await known_everywhere(pool, other):
        assert {name: record.state for name, record in state.replicas.items()} == {"r1": "hung", "r2": "ready"}
        assert state.open_until_ms == {"r1": 77}
    assert sorted(other.records) == ["r1", "r2"]


async def test_only_the_replicas_that_changed_are_told(pool: Pool, other: Pool, client: redis.Redis) -> None:
    await register(pool, 3)
    await known_everywhere(pool, other)
    await client.hset(KEYS.breakers, "r1", "1 0 0 5:1:0")
    await pool.beat()
    await client.hset(KEYS.breakers, "r1", "2 0 0 5:2:0")  # it counts failures, and is as closed as before
    await client.hset(KEYS.breakers, "r2", "1 99 0")
    await pool.beat()
    is_all, lines = await told(other)
    assert (is_all, sorted(lines)) == (0, [b"r1", b"r2"])
    assert (await other.beat()).open_until_ms == {"r1": 0, "r2": 99}


async def is_past(client: redis.Redis, version: str) -> bool:
    """Whether a later change gets another version: it is the time, in ms."""
    return await now_ms(client) > int(version.split("-")[1])


async def put_back(client: redis.Redis, keys: dict[str, Any]) -> None:
    """What a replica of Redis that lacks the last writes has under these keys."""
    await client.delete(KEYS.view, KEYS.view_changes)
    await client.hset(KEYS.view, mapping=keys[KEYS.view])
    await client.zadd(KEYS.view_changes, dict(keys[KEYS.view_changes]))


@pytest.mark.parametrize("lost", ["the last writes", "the view", "its changes", "another type", "everything"])
async def test_a_store_that_lost_writes_tells_everything_again(
    pool: Pool, other: Pool, client: redis.Redis, lost: str
) -> None:
    await register(pool, 2)
    await known_everywhere(pool, other)
    before = await dump(client, "*:view*")
    await pool.register(replica("r1", state="dead"))
    await known_everywhere(pool, other)
    await client.hset(KEYS.breakers, "r1", "3 77 0")
    await pool.beat()  # the other gateway has not heard of it when the store loses it
    await eventually(lambda: is_past(client, pool._version))
    if lost == "the last writes":
        await put_back(client, before)
    elif lost == "another type":
        await client.delete(KEYS.view_changes)
        await client.set(KEYS.view_changes, "x")
    elif lost == "everything":
        await client.flushdb()
    else:
        await client.delete(KEYS.view if lost == "the view" else KEYS.view_changes)
    await client.hset(KEYS.replicas, "r0", replica("r0", "life2").text)
    for _ in range(2):  # who beats first may not know yet what the others state again
        states = await known_everywhere(pool, other)
    assert {state.replicas["r0"].incarnation for state in states} == {"life2"}
    assert {state.replicas["r1"].state for state in states} == {"dead"}
    assert [state.open_until_ms for state in states] == [{} if lost == "everything" else {"r1": 77}] * 2
    assert {pool._version for pool in (pool, other)} == {states[0].version}


async def test_a_new_connection_asks_for_everything(pool: Pool, redis_server: RedisServer) -> None:
    await register(pool, 2)
    await pool.beat()
    assert (await told(pool))[0] == 0
    assert pool.link.wire is not None
    pool.attach(pool.link.wire)
    assert (await told(pool))[0] == 1


async def test_heartbeats_of_a_large_pool_share_a_look_and_see_their_own_writes(
    pool: Pool, other: Pool, client: redis.Redis
) -> None:
    await large(client)
    await known_everywhere(pool, other, pool, other)
    await client.config_resetstat()
    for state in await known_everywhere(pool, other):
        assert len(state.replicas) == MANY
    calls = await calls_of(client)
    assert calls["evalsha"] == 2
    assert "hgetall" not in calls
    pool.change_state("many7", "life1", "ready", "hung")
    assert (await pool.beat()).replicas["many7"].state == "hung"
    assert (await other.beat()).replicas["many7"].state == "hung"


async def test_when_a_look_is_old_the_next_heartbeat_makes_another(
    pool: Pool, other: Pool, client: redis.Redis
) -> None:
    await large(client)
    await known_everywhere(pool, other)
    await client.hset(KEYS.breakers, "many7", "3 77 0")
    assert (await pool.beat()).open_until_ms == {}
    head = (await hash_of(client, KEYS.view))["?"].split(" ")
    head[2] = str(int(head[2]) - 2000)
    await client.hset(KEYS.view, "?", " ".join(head))
    assert (await pool.beat()).open_until_ms == {"many7": 77}
    assert (await other.beat()).open_until_ms == {"many7": 77}


async def test_replicas_that_come_and_go_leave_no_growing_list(pool: Pool, other: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await known_everywhere(pool, other)
    for i in range(30):
        names = [f"gone{i}.{j}" for j in range(5)]
        await client.hset(KEYS.replicas, mapping={name: replica(name).text for name in names})
        await pool.beat()
        await client.hdel(KEYS.replicas, *names)
        await pool.beat()
    assert await client.zcard(KEYS.view_changes) <= 90
    assert sorted((await other.beat()).replicas) == ["r0"]


async def test_figures_are_those_of_the_scrape_and_stay_while_the_store_is_away(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await client.hset(KEYS.engines, "r0", '{"running":2}')
    await place(pool, "a", chain(1))
    await pool.read_figures()
    assert pool.figures == ReplicaFigures({"r0": 1}, {"r0": {"running": 2.0}})
    pool.done("a")
    await drained(pool)
    await pool.read_figures()
    assert pool.figures.active == {"r0": 0}
    pool.detach()
    with pytest.raises(StoreDown):
        await pool.read_figures()
    assert pool.figures.engines == {"r0": {"running": 2.0}}
