"""Redis' clock is set back, for example by a failover to a host whose clock is behind. Live gateways and agents keep
their leases, and dead ones lose them in time."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from coordinator.keys import WATCHER
from coordinator.pool.pool import LEASE_MS, Pool
from coordinator.survey import Survey
from tests.coordinator.clock.stage import HOUR_MS, Clock
from tests.coordinator.stage import (
    KEYS,
    beaten,
    chain,
    drained,
    numbers,
    place,
)
from tests.coordinator.stream import VITALS, attend, linked
from tests.redis_server import RedisServer


@pytest.mark.parametrize("back_ms", [HOUR_MS, 2 * LEASE_MS, 365 * 24 * HOUR_MS])
async def test_no_live_lease_ends_and_none_lives_on(
    pool: Pool, other: Pool, client: redis.Redis, clock: Clock, back_ms: int
) -> None:
    await place(other, "theirs", chain(1))
    await clock.follow("r0")
    await pool.beat()
    await clock.step(-back_ms)
    fleet = await pool.beat()
    assert (fleet.known, fleet.expired_gateways, fleet.worker) == (True, (), "gw0")
    assert fleet.is_exact("r0")
    assert not fleet.is_exact("r1")
    for key, field, position in (
        (KEYS.gateways, "gw1", 1),
        (KEYS.leases, "worker", 1),
        (KEYS.agents, "r0", 2),
    ):
        assert 0 < await clock.left_ms(key, field, position) <= LEASE_MS, field
    await clock.step(LEASE_MS)  # a heartbeat would take this for a pause, so the tick follows
    await client.hset(KEYS.leases, "tick", await clock.now_ms())
    assert (await beaten(pool)).expired_gateways == ("gw1",)
    assert await numbers(client, KEYS.active) == {}


async def test_a_lease_that_was_renewed_before_anybody_noticed_is_not_moved_back(
    pool: Pool, other: Pool, client: redis.Redis, clock: Clock
) -> None:
    """A failover: every gateway reconnects and reasserts its requests before any heartbeat arrives."""
    await place(other, "theirs", chain(1))
    await clock.step(-HOUR_MS)
    other.reassert()
    await drained(other)
    assert (await pool.beat()).expired_gateways == ()
    assert await clock.left_ms(KEYS.gateways, "gw1") > 0


async def test_what_nobody_saw_go_back_lasts_no_longer_than_it_could(
    pool: Pool, other: Pool, client: redis.Redis, clock: Clock
) -> None:
    """An older gateway, without this rule, sends the first heartbeat. After that, the last tick no longer shows the
    step."""
    await client.hset(KEYS.agents, "r0", f"agent0 life1 {await clock.now_ms() + HOUR_MS} session 0 0 -1")
    await client.hset(KEYS.gateways, "gw1", f"1 {await clock.now_ms() + HOUR_MS}")
    assert (await pool.beat()).expired_gateways == ()
    for key, field, position in ((KEYS.gateways, "gw1", 1), (KEYS.agents, "r0", 2)):
        assert await clock.left_ms(key, field, position) <= LEASE_MS


async def test_an_agent_is_not_told_to_wait_for_an_hour_and_gets_the_replica_in_seconds(
    pool: Pool, client: redis.Redis, clock: Clock, redis_server: RedisServer
) -> None:
    async with linked(redis_server.url, agent="first") as first, linked(redis_server.url, agent="second") as second:
        await attend(first)
        await clock.step(-HOUR_MS)
        wait_s = await second.attend(VITALS)
        assert isinstance(wait_s, float)
        assert wait_s <= LEASE_MS / 1000
        await pool.beat()
        assert 0 < await clock.left_ms(KEYS.agents, "r0", 2) <= LEASE_MS


async def test_a_dead_watchers_lease_is_over_in_seconds(pool: Pool, client: redis.Redis, clock: Clock) -> None:
    async def watches(who: str) -> bool:
        lease = {"watcher_name": who, "lease_ms": LEASE_MS, "report": "", "leaving": False}
        return bool(await pool.run("watch", watcher=WATCHER, **lease))

    assert await watches("gw0")
    await clock.step(-HOUR_MS)
    assert not await watches("gw1")
    assert int((await client.get(WATCHER)).split(" ")[1]) - await clock.now_ms() <= LEASE_MS
    await clock.step(LEASE_MS + 1)
    assert await watches("gw1")


async def test_a_step_back_is_written_down_for_the_doctor(
    pool: Pool, client: redis.Redis, clock: Clock, redis_server: RedisServer
) -> None:
    survey = await Survey.open(redis_server.url, 5.0)
    try:
        assert (await survey.snapshot("m")).went_back == (0, 0)
        await clock.step(-HOUR_MS)
        await pool.beat()
        at_ms, by_ms = (await survey.snapshot("m")).went_back
    finally:
        await survey.close()
    assert abs(at_ms - await clock.now_ms()) < 10_000
    assert HOUR_MS - 10_000 < by_ms <= HOUR_MS


@pytest.mark.parametrize("back_ms", [HOUR_MS, 300])
async def test_in_a_large_pool_too_every_expiry_moves_back_with_the_clock(
    pool: Pool, client: redis.Redis, clock: Clock, back_ms: int
) -> None:
    """Heartbeats of a large pool seldom look at all records. One that finds that the clock went back does."""
    since_ms = await clock.now_ms()
    many = {f"many{i}": f"life1 ready 0 {since_ms} 0 http://many{i}.test" for i in range(3000)}
    await client.hset(KEYS.replicas, mapping=many)
    await pool.beat()
    await clock.follow("many7")
    await client.hset(KEYS.breakers, "many7", f"3 {await clock.now_ms() + 5000} 0")
    await clock.step(-back_ms)
    await client.hset(KEYS.leases, "tick", await clock.now_ms() + back_ms)  # however long writing the records took
    assert (await pool.beat()).is_exact("many7")
    assert 0 < await clock.left_ms(KEYS.agents, "many7", 2) <= LEASE_MS
    assert 0 < await clock.left_ms(KEYS.breakers, "many7") <= 5000 + 300
