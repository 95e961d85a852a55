"""Reaping runs beside the heartbeats, in pieces. The sums stay right if any gateway dies or returns in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreError
from coordinator.maintenance import reaper
from coordinator.maintenance.reaper import Reaper
from coordinator.maintenance.worker import Worker
from coordinator.placement import Reservation
from coordinator.pool.lost_gateways import REMEMBERED_S, note_lost, read_lost
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, beaten, chain, drained, hash_of, joined, now_ms, numbers, place, register
from tests.coordinator.stream import followed
from tests.polling import eventually
from tests.redis_server import RedisServer

REQUESTS = 5


@pytest.fixture
async def dead(redis_server: RedisServer, client: redis.Redis, pool: Pool) -> AsyncIterator[Pool]:
    """gw1, whose lease has ended with five requests in flight on r0. gw0 does the maintenance."""
    await pool.beat()
    await register(pool, 1)
    async with joined(redis_server.url, "gw1") as dead:
        for number in range(REQUESTS):
            await place(dead, f"theirs{number}", chain(number))
        await drained(dead)
        epoch = (await hash_of(client, KEYS.gateways))["gw1"].split(" ")[0]
        await client.hset(KEYS.gateways, "gw1", f"{epoch} {await now_ms(client) - 1}")
        yield dead


async def reap_a_piece(pool: Pool, limit: int) -> int:
    """Reaps one piece, as a reaper that dies afterwards. Returns the number of requests that are left."""
    return int(await pool.run("reap", gateway="gw1", at_most=limit, silent_ms=0))


async def test_all_is_given_back_and_seen_to_in_pieces(
    pool: Pool, dead: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_GIVEN_BACK_AT_ONCE", "_HANDLED_AT_ONCE", "_KEYS_AT_ONCE"):
        monkeypatch.setattr(reaper, limit, 2)
    await followed(client, "r0")
    await beaten(pool)
    assert await numbers(client, KEYS.active) == await numbers(client, KEYS.backlog_tokens) == {}
    assert await numbers(client, KEYS.owned_tokens) == {}
    assert not await client.exists(KEYS.flight("gw1"), KEYS.reaped)
    assert list(await hash_of(client, KEYS.gateways)) == ["gw0"]


async def test_when_the_reaper_dies_in_the_middle_another_goes_on(pool: Pool, dead: Pool, client: redis.Redis) -> None:
    await followed(client, "r0")
    assert await reap_a_piece(pool, 2) == REQUESTS - 2
    assert await numbers(client, KEYS.active) == {"r0": REQUESTS - 2}
    assert (await hash_of(client, KEYS.gateways))["gw1"].startswith("0 ")
    await beaten(pool)
    assert await numbers(client, KEYS.active) == await numbers(client, KEYS.owned_tokens) == {}
    assert not await client.exists(KEYS.reaped)


async def read_nothing(pool: Pool) -> bool:
    return await read_lost(pool) == {}


async def test_who_died_is_remembered_and_who_left_or_came_back_is_not(
    pool: Pool, dead: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    async with joined(redis_server.url, "gw2") as other:
        await other.beat()
        await other.beat(leaving=True)
    await beaten(pool)
    died = await read_lost(pool)
    assert list(died) == ["gw1"]
    assert abs(died["gw1"] - await now_ms(client)) < 60_000
    assert 0 < await client.ttl(KEYS.lost_gateways) <= REMEMBERED_S
    again = Reaper(dead)
    for _ in range(2):  # the first one tells it that it has to register
        again.go_on(await dead.beat())
    await eventually(lambda: read_nothing(pool))
    await note_lost(pool, "gw1")
    assert await read_lost(pool) == {}
    await client.hset(KEYS.lost_gateways, mapping={"gw3": await now_ms(client) - 2000 * REMEMBERED_S, "gw4": "x"})
    assert await read_lost(pool) == {}, "too long ago, and what is no time"
    await client.hset(KEYS.gateways, "gw7.bbb", f"1 {await now_ms(client) + 60_000}")
    await note_lost(pool, "gw7.aaa")  # its next run has registered before the lease of this one ended
    await note_lost(pool, "gw6.ec3223")
    assert list(await hash_of(client, KEYS.lost_gateways)) == ["gw4", "gw6"], "what is too old was removed"
    await client.set(KEYS.lost_gateways, "no hash")
    await note_lost(pool, "gw5")
    assert await read_lost(pool) == {}


async def test_claims_wait_for_the_gateway_that_does_the_maintenance(
    pool: Pool, dead: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    await followed(client, "r0")
    async with joined(redis_server.url, "gw2") as other:
        await beaten(other)
    assert await numbers(client, KEYS.active) == {}
    assert await client.hlen(KEYS.reaped) == REQUESTS
    maintenance = Worker(pool)
    await maintenance.tick()
    await eventually(lambda: is_seen_to(client))
    assert await numbers(client, KEYS.owned_tokens) == {}


async def is_seen_to(client: redis.Redis) -> bool:
    return not await client.exists(KEYS.reaped)


async def test_heartbeats_do_not_wait_for_the_reaper_of_which_there_is_one_at_a_time(
    pool: Pool, dead: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[str]()

    async def hang(*_: Any) -> None:
        begun.append("load")
        await asyncio.Event().wait()

    monkeypatch.setattr(Reaper, "give_back", hang)
    maintenance = Worker(pool)
    for _ in range(3):
        await maintenance.tick()
    assert begun == ["load"]
    maintenance.close()


async def test_claims_that_take_long_keep_no_load_of_another_gateway(
    pool: Pool, dead: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Reaper, "handle_claims", hang)
    await client.hset(KEYS.reaped, "theirs", "r0 life1 1 0 - gw9")
    maintenance = Worker(pool)
    await maintenance.tick()
    await eventually(lambda: is_given_back(client))
    maintenance.close()


async def is_given_back(client: redis.Redis) -> bool:
    return await numbers(client, KEYS.active) == {}


async def test_gateways_that_do_no_maintenance_reap_what_the_next_heartbeat_still_names(
    pool: Pool, dead: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    async with joined(redis_server.url, "gw2") as other:
        maintenance = Worker(other)
        await maintenance.tick()
        await drained(other)
        assert await numbers(client, KEYS.active) == {"r0": REQUESTS}
        await maintenance.tick()
        await eventually(lambda: is_given_back(client))
        maintenance.close()


async def test_a_gateway_that_comes_back_while_it_is_reaped_starts_anew_with_its_live_requests(
    pool: Pool, dead: Pool, client: redis.Redis
) -> None:
    """The gateway's calls count for nothing until it learns that it was reaped. Its running requests keep their
    claims."""
    await followed(client, "r0")
    assert await reap_a_piece(pool, 2) == REQUESTS - 2
    dead.done("theirs0")
    dead.adopt(Reservation("late", "r0", "life1", 7, "-"))
    assert not (await dead.beat()).known
    await drained(dead)
    live = set(dead.live)
    assert len(live) == REQUESTS
    assert set(await hash_of(client, KEYS.flight("gw1"))) == live
    assert await numbers(client, KEYS.active) == {"r0": REQUESTS}
    await beaten(pool)
    assert (await dead.beat()).known
    assert await numbers(client, KEYS.active) == {"r0": REQUESTS}
    assert (await numbers(client, KEYS.owned_tokens))["r0"] >= (REQUESTS - 1) * 100
    assert not await client.exists(KEYS.reaped)


async def test_what_cannot_be_read_among_the_reaped_keeps_nothing_else_waiting(
    pool: Pool, dead: Pool, client: redis.Redis
) -> None:
    await followed(client, "r0")
    await client.hset(KEYS.reaped, mapping={"": "", "a": "garbage", b"\xff": b"r0 \xff"})
    await beaten(pool)
    assert await numbers(client, KEYS.owned_tokens) == {}
    assert not await client.exists(KEYS.reaped)


async def test_where_a_key_is_of_another_type_nothing_is_given_back_twice(
    pool: Pool, dead: Pool, client: redis.Redis
) -> None:
    await client.set(KEYS.reaped, "x")
    for _ in range(2):
        with pytest.raises(StoreError):
            await reap_a_piece(pool, REQUESTS)
    assert await numbers(client, KEYS.active) == {"r0": REQUESTS}
    await client.delete(KEYS.reaped)
    await beaten(pool)
    assert await numbers(client, KEYS.active) == {}
