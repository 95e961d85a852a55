"""A drained replica gets no new requests and keeps those that it has. When they are over, its keys are forgotten."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio as redis

from coordinator.maintenance.held_keys import _EVER_MS, trim_piece
from coordinator.maintenance.worker import Worker
from coordinator.pool.draining import Drained, drain
from coordinator.pool.pool import Pool
from coordinator.pool.queue_view import read_queue
from tests.coordinator.queueing import asking, fill, queued, two_gateways
from tests.coordinator.stage import KEYS, chain, drained, joined, place, register, replica, request
from tests.redis_server import RedisServer

LARGE = 24
"""Replicas that placements look at by orders."""


async def state_of(client: redis.Redis, name: str) -> str:
    return str((await client.hget(KEYS.replicas, name)).split(" ")[1])


async def shown_states(pool: Pool) -> set[str]:
    """As `kvgate queue` shows them."""
    return {room.state for room in (await read_queue(pool, 0, 0, 1.0))[1]}


@pytest.mark.parametrize("count", [3, LARGE])
async def test_new_requests_go_elsewhere_except_those_that_can_go_nowhere_else(pool: Pool, count: int) -> None:
    names = await register(pool, count)
    first = await place(pool, "a", chain("prompt"), pinned="r1")
    assert await drain(pool.run, "r1") == Drained("draining", 1)
    chosen = {(await place(pool, f"same{i}", chain("prompt"))).replica for i in range(count)}
    assert chosen <= set(names) - {"r1"}
    assert await shown_states(pool) == {"ready", "draining"}
    assert (await place(pool, "pinned", chain("prompt"), pinned="r1")).replica == first.replica
    assert await pool.place(request("alone", chain(1), tried=[name for name in names if name != "r1"])) is None
    assert await drain(pool.run, "nobody") == Drained("", 0)


@pytest.mark.parametrize("count", [1, LARGE])
async def test_if_all_are_drained_requests_are_refused_until_the_drain_is_over(pool: Pool, count: int) -> None:
    for name in await register(pool, count):
        await drain(pool.run, name)
    assert await shown_states(pool) == {"drained"}
    assert await pool.place(request("a", chain(1))) is None
    assert (await drain(pool.run, "r0", is_over=True)).state == "ready"
    assert (await place(pool, "b", chain(1))).replica == "r0"


async def test_drained_replicas_do_not_hide_a_dead_one_that_may_be_tried(pool: Pool) -> None:
    for name in await register(pool, LARGE):
        if name != "r23":
            await drain(pool.run, name)
    await pool.register(replica("r23", state="dead"))
    assert (await place(pool, "a", chain(1))).why == "last_resort"


async def test_a_drain_is_that_of_one_incarnation(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await drain(pool.run, "r0")
    for state in ("dead", "ready"):  # it was away for a moment
        await pool.register(replica("r0", state=state))
    assert await state_of(client, "r0") == "draining"
    for before, after in (("draining", "hung"), ("hung", "ready")):
        pool.change_state("r0", "life1", before, after)
    await drained(pool)
    assert await state_of(client, "r0") == "draining"
    await pool.register(replica("r0", "life2"))
    assert await state_of(client, "r0") == "ready"
    assert await client.exists(KEYS.draining) == 0


async def test_a_store_that_was_emptied_learns_of_the_drain_from_the_gateways(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    await drain(pool.run, "r0")
    await pool.beat()
    await client.delete(KEYS.replicas, KEYS.draining)
    pool.reassert()
    await drained(pool)
    await pool.register(replica("r0"))
    assert await state_of(client, "r0") == "draining"


async def test_an_agent_that_finds_an_emptied_store_first_does_not_end_a_drain(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    await drain(pool.run, "r0")
    await drain(pool.run, "r1")
    await drain(pool.run, "r1", is_over=True)
    await pool.beat()
    await client.delete(KEYS.replicas, KEYS.draining)
    for name in ("r0", "r1"):
        await pool.run("register", **replica(name).register_arguments(only_if_absent=True))
    pool.reassert()
    await drained(pool)
    assert [await state_of(client, name) for name in ("r0", "r1")] == ["draining", "ready"]


async def test_a_gateway_that_missed_the_end_of_a_drain_does_not_begin_it_again(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await drain(pool.run, "r0")
    await pool.beat()
    await drain(pool.run, "r0", is_over=True)
    assert pool.records["r0"].state == "draining"
    pool.reassert()
    await drained(pool)
    assert await state_of(client, "r0") == "ready"


async def test_a_replica_that_is_not_drained_any_more_keeps_the_keys_that_were_not_forgotten_yet(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(*range(400)))
    pool.done("a")
    await drain(pool.run, "r0")
    await drained(pool)
    left = await trim_everything(pool, pieces=1)
    await drain(pool.run, "r0", is_over=True)
    assert await trim_everything(pool, pieces=9) == left
    assert await client.zcard(KEYS.held("r0")) == left > 0


async def trim_everything(pool: Pool, pieces: int) -> int:
    """Forgets keys of r0 as maintenance does. Returns how many are left."""
    for _ in range(pieces):
        await trim_piece(pool, "r0", _EVER_MS, to_capacity=False)
    return int(await pool.read("ZCARD", KEYS.held("r0")))


async def test_its_keys_are_forgotten_when_its_last_request_is_over(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    await place(pool, "a", chain(1, 2), pinned="r0")
    await place(pool, "b", chain(3), pinned="r1")
    await drain(pool.run, "r0")
    maintenance = Worker(pool)
    await maintenance.tick()
    assert await client.zcard(KEYS.held("r0")) == 2
    pool.done("a")
    await drained(pool)
    await maintenance.tick()
    assert await client.exists(KEYS.held("r0"), *map(KEYS.own, chain(1, 2))) == 0
    assert await client.hget(KEYS.owned_tokens, "r0") == "0"
    assert await client.zcard(KEYS.held("r1")) == 1
    await client.hset(KEYS.agents, "r0", "agent0 life1 1 session 0 0 1")
    await drain(pool.run, "r0", is_over=True)
    assert await client.hget(KEYS.asks, "r0") == "restate"


async def test_the_end_of_a_drain_grants_the_room(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        await drain(one.run, "r2")
        await fill(one, 2)
        task = await queued(client, other, asking("late"))
        await drain(other.run, "r2", is_over=True)
        async with asyncio.timeout(5):
            placement = await task
        assert placement is not None
        assert placement.replica == "r2"


async def test_a_gateway_that_comes_later_does_not_end_a_drain(redis_server: RedisServer, client: redis.Redis) -> None:
    async with joined(redis_server.url) as pool, joined(redis_server.url, "gw1") as other:
        await register(pool, 1)
        await drain(pool.run, "r0")
        await other.register(replica("r0"), only_if_absent=True)
        await other.register(replica("r0", capacity_tokens=7))
        assert await state_of(client, "r0") == "draining"
