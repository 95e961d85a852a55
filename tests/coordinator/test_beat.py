"""Leases: a dead gateway's reservations are given back, and a live gateway's are never."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from coordinator.maintenance.reaper import Reaper
from coordinator.pool import pool as pool_module
from coordinator.pool.pool import LEASE_MS, MAX_GAP_MS, Pool
from tests.coordinator.stage import (
    KEYS,
    beaten,
    chain,
    drained,
    hash_of,
    joined,
    now_ms,
    numbers,
    owners,
    place,
    register,
    replica,
)
from tests.coordinator.stream import followed
from tests.redis_server import RedisServer


@pytest.fixture
async def other(redis_server: RedisServer, client: redis.Redis) -> AsyncIterator[Pool]:
    async with joined(redis_server.url, "gw1") as pool:
        yield pool


async def lease_of(client: redis.Redis, gateway: str) -> tuple[int, int]:
    epoch, until_ms = (await hash_of(client, KEYS.gateways))[gateway].split(" ")
    return int(epoch), int(until_ms)


async def let_lease_end(client: redis.Redis, gateway: str, ago_ms: int = 1) -> None:
    epoch, _ = await lease_of(client, gateway)
    await client.hset(KEYS.gateways, gateway, f"{epoch} {await now_ms(client) - ago_ms}")


async def reap(pool: Pool, gateway: str) -> None:
    """Reaps a gateway as if a heartbeat had named it."""
    await pool.beat()
    await Reaper(pool).give_back([gateway])


async def test_a_beat_renews_its_own_lease_and_nobody_elses(pool: Pool, other: Pool, client: redis.Redis) -> None:
    await other.beat()
    await client.hset(KEYS.gateways, "gw0", f"1 {await now_ms(client) + 5}")
    theirs = await lease_of(client, "gw1")
    before_ms = await now_ms(client)
    fleet = await pool.beat()
    assert fleet.known
    assert before_ms <= (await lease_of(client, "gw0"))[1] - LEASE_MS <= await now_ms(client)
    assert await lease_of(client, "gw1") == theirs


async def test_a_beat_tells_of_the_fleet(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1, capacity_tokens=500)
    pool.register(replica("r1", state="dead"))
    await place(pool, "a", chain(1))
    await drained(pool)
    await client.hset(KEYS.breakers, mapping={"r0": "1 0 0", "r1": "3 77 1"})
    fleet = await pool.beat()
    assert pool.state is fleet
    assert {name: (one.state, one.capacity_tokens) for name, one in fleet.replicas.items()} == {
        "r0": ("ready", 500),
        "r1": ("dead", 0),
    }
    assert fleet.replicas["r0"].since_ms > 0
    assert fleet.open_until_ms == {"r0": 0, "r1": 77}
    await pool.read_figures()
    assert pool.figures.active == {"r0": 1, "r1": 0}


async def test_a_beat_learns_replicas_that_other_gateways_registered(pool: Pool, other: Pool) -> None:
    await register(other, 2)
    await pool.beat()
    assert sorted(pool.records) == ["r0", "r1"]


async def test_what_a_dead_gateway_claimed_and_did_not_hold_is_held(
    pool: Pool, other: Pool, client: redis.Redis
) -> None:
    """Both replicas received the same prompt. Its chain is bound once, and each replica holds the chain's keys."""
    await register(pool, 2)
    keys = chain(1, 2, 3)
    await place(other, "a", keys, pinned="r0")
    await place(other, "b", keys, pinned="r1")
    await drained(other)
    await client.delete(KEYS.held("r0"), KEYS.held("r1"))
    await pool.beat()
    await let_lease_end(client, "gw1")
    await beaten(pool)
    await drained(pool)
    assert await client.zrevrange(KEYS.held("r0"), 0, -1) == keys
    assert await client.zrevrange(KEYS.held("r1"), 0, -1) == keys


async def test_what_a_dead_gateway_claimed_and_no_event_confirmed_is_withdrawn(
    pool: Pool, other: Pool, client: redis.Redis
) -> None:
    """The dead gateway's request broke off with it. The replica's agent reports the computed blocks, so an unconfirmed
    claim must not remain."""
    await register(pool, 2)
    await followed(client, "r0")
    await followed(client, "r1", mode="none")
    await place(other, "told", chain(1, 2, 3), pinned="r0")
    await place(other, "untold", chain(1, 2, 3), pinned="r1")
    await drained(other)
    await pool.beat()
    await let_lease_end(client, "gw1")
    await beaten(pool)
    assert await numbers(client, KEYS.owned_tokens) == {"r1": 300}
    assert await client.zcard(KEYS.held("r0")) == 0
    assert await client.zcard(KEYS.held("r1")) == 3


async def test_a_live_gateways_reservations_are_never_reaped(pool: Pool, other: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(other, "theirs", chain(1))
    for _ in range(3):
        assert (await pool.beat()).expired_gateways == ()
    await reap(pool, "gw1")
    assert await numbers(client, KEYS.active) == {"r0": 1}


async def test_a_gateway_that_comes_back_between_beat_and_reap_keeps_what_it_holds(
    pool: Pool, other: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await place(other, "theirs", chain(1))
    await let_lease_end(client, "gw1")
    await other.beat()
    await reap(pool, "gw1")
    assert list(await hash_of(client, KEYS.flight("gw1"))) == ["theirs"]


async def test_reaping_twice_gives_back_once(pool: Pool, other: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "mine", chain(1))
    await place(other, "theirs", chain(2))
    await let_lease_end(client, "gw1")
    await reap(pool, "gw1")
    await reap(pool, "gw1")
    assert await numbers(client, KEYS.active) == {"r0": 1}


async def test_time_in_which_the_store_did_not_serve_ends_no_lease(
    pool: Pool, other: Pool, client: redis.Redis
) -> None:
    """The store stood still for 8 s, so every gateway's last heartbeat was 8 s ago. None of them is dead."""
    await register(pool, 1)
    await place(other, "theirs", chain(1))
    await pool.beat()
    gap_ms, before_ms = 8000, await now_ms(client)
    await let_lease_end(client, "gw1", ago_ms=gap_ms - 2000)
    await client.hset(KEYS.leases, "tick", await now_ms(client) - gap_ms)
    assert (await pool.beat()).expired_gateways == ()
    _, until_ms = await lease_of(client, "gw1")
    assert before_ms + 2000 <= until_ms <= await now_ms(client) + 2000
    assert (await pool.beat()).expired_gateways == ()
    assert await numbers(client, KEYS.active) == {"r0": 1}


async def test_a_gateway_that_was_dead_before_the_pause_is_still_reaped_after_it(
    pool: Pool, other: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await place(other, "theirs", chain(1))
    gap_ms = 8000
    await let_lease_end(client, "gw1", ago_ms=gap_ms + 500)
    await client.hset(KEYS.leases, "tick", await now_ms(client) - gap_ms)
    assert (await beaten(pool)).expired_gateways == ("gw1",)
    assert await numbers(client, KEYS.active) == {}


async def test_an_ordinary_delay_between_beats_extends_nothing(pool: Pool, other: Pool, client: redis.Redis) -> None:
    await pool.beat()
    await let_lease_end(client, "gw1")
    await client.hset(KEYS.leases, "tick", await now_ms(client) - MAX_GAP_MS + 200)
    assert (await pool.beat()).expired_gateways == ("gw1",)


async def test_one_gateway_holds_the_worker_lease_until_it_ends(pool: Pool, other: Pool, client: redis.Redis) -> None:
    assert (await pool.beat()).worker == "gw0"
    assert (await other.beat()).worker == "gw0"
    assert (await pool.beat()).worker == "gw0"
    await client.hset(KEYS.leases, "worker", f"gw0 {await now_ms(client) - 1}")
    assert (await other.beat()).worker == "gw1"
    assert (await pool.beat()).worker == "gw1"


async def test_a_gateway_that_leaves_gives_everything_back_at_once(
    pool: Pool, other: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await pool.beat()
    await place(pool, "mine", chain(1))
    pool.live.clear()
    pool.reassert()
    await pool.beat(leaving=True)
    assert list(await hash_of(client, KEYS.gateways)) == ["gw1"]
    assert await numbers(client, KEYS.active) == {}
    assert (await other.beat()).worker == "gw1"
    assert list(await owners(client, chain(1)[0])) == ["r0"]


async def test_gateways_know_how_many_they_are_and_wait_for_others_to_come_back(
    pool: Pool, other: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "RESTATED_S", 60.0)
    assert pool.gateways == 1
    await beaten(other)
    await drained(other)
    await beaten(pool)
    assert pool.gateways == 2
    await client.flushall()
    await beaten(pool)  # it finds that the store has forgotten it, and states everything
    await beaten(pool)
    assert pool.gateways == 2, "the other one has not come back yet"
    assert 0 < pool.restated_in_s() <= 60
    monkeypatch.setattr(pool, "restated_in_s", lambda: 0.0)
    await beaten(pool)
    assert pool.gateways == 1
    await beaten(other)
    await drained(other)
    await beaten(pool)
    assert pool.gateways == 2
