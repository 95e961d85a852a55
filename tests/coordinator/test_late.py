"""A placement leaves nothing behind if its caller is gone before the reply, whatever the outcome of the placement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreDown, StoreLate
from coordinator.placement import PlaceRequest, Reservation
from coordinator.pool.pool import Pool
from coordinator.redis.time_limit import IN_ALL
from coordinator.redis.wire import Wire, load_scripts
from tests.coordinator.stage import (
    KEYS,
    chain,
    chain_of,
    drained,
    dump,
    hash_of,
    joined,
    numbers,
    place,
    register,
    request,
    standing_still,
)
from tests.polling import eventually
from tests.redis_server import RedisServer

BUDGET_S = 0.2


@pytest.fixture
async def pool(redis_server: RedisServer, client: redis.Redis) -> AsyncIterator[Pool]:
    async with joined(redis_server.url, budget_s=BUDGET_S) as pool:
        await register(pool, 2)
        await place(pool, "warm up", chain("warm up"))
        pool.done("warm up")
        await drained(pool)
        await client.delete(*(await dump(client, "*:own:*", "*:held:*", "*:bound:*")))
        await client.hset(KEYS.owned_tokens, mapping={"r0": 0, "r1": 0})
        yield pool


async def left_behind(client: redis.Redis) -> dict[str, object]:
    """Everything that a placement may have written to the store, except binds, which expire."""
    found = await dump(client, "*:own:*", "*:held:*", "*:flight:*")
    for key in (KEYS.active, KEYS.backlog_tokens, KEYS.owned_tokens):
        found.update(await numbers(client, key))
    return found


async def test_a_late_place_leaves_no_reservation_and_no_claim(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    with standing_still(redis_server), pytest.raises(StoreLate):
        await pool.place(request("late", chain(1, 2)))
    await drained(pool)
    assert await left_behind(client) == {}
    assert await chain_of(client, chain(1, 2)[-1])  # the placement ran


async def test_a_place_that_this_process_has_kept_too_long_is_not_sent_and_before_that_loses_nothing(
    pool: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare = pool.placer.declare

    def busy(share_of_budget: float) -> Callable[[PlaceRequest], bool]:
        def busily(request: PlaceRequest) -> bool:
            until_s = time.monotonic() + BUDGET_S * share_of_budget
            while time.monotonic() < until_s:
                pass
            return declare(request)

        return busily

    limit = pool.placer.window.limit
    with monkeypatch.context() as patch:
        patch.setattr(pool.placer, "declare", busy(IN_ALL))
        with pytest.raises(StoreLate, match="this process was too busy") as late:
            await pool.place(request("late", chain(1, 2)))
        assert late.value.cause == "gateway"
        await drained(pool)
        assert await left_behind(client) == {}
        assert not await chain_of(client, chain(1, 2)[-1])
        assert (pool.placer.window.taken, pool.placer.window.limit) == (0, limit)
        patch.setattr(pool.placer, "declare", busy(1.2))
        assert await pool.place(request("in time", chain(1, 2)))


async def test_a_cancelled_place_leaves_nothing_either(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    with standing_still(redis_server):
        placing = asyncio.ensure_future(pool.place(request("cancelled", chain(1, 2))))
        await asyncio.sleep(0)
        placing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await placing
    await drained(pool)
    assert await left_behind(client) == {}


async def test_a_place_cancelled_in_the_very_turn_of_its_reply_leaves_nothing_either(
    pool: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = pool.link.wire
    assert wire is not None
    answer = wire._answer
    placing = asyncio.ensure_future(pool.place(request("cancelled", chain(1, 2))))
    with monkeypatch.context() as patch:
        patch.setattr(wire, "_answer", lambda call, reply: (answer(call, reply), placing.cancel()))
        await asyncio.wait([placing])
    with pytest.raises(asyncio.CancelledError):
        await placing
    await drained(pool)
    assert await left_behind(client) == {}
    assert pool.live == {}


async def test_an_unused_claim_does_not_survive_because_its_connection_was_given_up(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    """The store stands still until the connection is discarded. Then it runs the buffered commands."""
    old_wire = pool.link.wire
    assert old_wire is not None
    with standing_still(redis_server):
        placing = [asyncio.ensure_future(pool.place(request(f"late{i}", chain(i, 2)))) for i in range(3)]
        unanswered = asyncio.ensure_future(pool.place(request("unanswered", chain("x", 2))))
        results = await asyncio.gather(*placing, return_exceptions=True)
        assert {type(result) for result in results} == {StoreLate}
        pool.detach()
        await old_wire.close("overdue")
        assert isinstance((await asyncio.gather(unanswered, return_exceptions=True))[0], StoreLate | StoreDown)
    await eventually(lambda: chain_of(client, chain("x", 2)[-1]))
    assert await left_behind(client) != {}
    wire = await Wire.open(redis_server.url, 5.0, lambda _: None)
    await load_scripts(wire)
    pool.attach(wire)
    await drained(pool)
    assert await left_behind(client) == {}
    pool.detach()
    await wire.close()


async def test_a_request_that_fell_back_keeps_its_reservation_when_its_late_place_is_undone(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    with standing_still(redis_server):
        with pytest.raises(StoreLate):
            await pool.place(request("a", chain(1, 2), pinned="r0"))
        pool.adopt(Reservation("a", "r1", "life1", 200, chain(1, 2)[-1]))
        pool.reservations.count_adopted()
    await drained(pool)
    assert await left_behind(client) == {}, "nothing is told before the late reply"
    pool.reservations.count_adopted()
    await drained(pool)
    assert await numbers(client, KEYS.active) == {"r1": 1}
    assert await numbers(client, KEYS.backlog_tokens) == {"r1": 200}
    assert await dump(client, "*:own:*", "*:held:*") == {}
    pool.done("a")
    pool.reservations.count_adopted()
    await drained(pool)
    assert await left_behind(client) == {}


async def test_a_late_retry_has_given_the_failed_attempt_back(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    first = await place(pool, "first", chain(1))
    with standing_still(redis_server):
        with pytest.raises(StoreLate):
            await pool.place(request("second", chain(1), tried=(first.replica,), release="first"))
        pool.done("first")
    await drained(pool)
    assert await numbers(client, KEYS.active) == {}
    assert await hash_of(client, KEYS.flight("gw0")) == {}


async def test_keys_whose_holding_was_lost_with_the_connection_are_held_on_the_next(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    wire = pool.link.wire
    assert wire is not None
    placed = await pool.place(request("a", chain(1, 2)))
    assert placed is not None
    pool.detach()
    await wire.close("cut")
    await client.delete(KEYS.held(placed.replica))
    pool.claims.hold(placed.replica, chain(1, 2))
    await asyncio.sleep(0)
    wire = await Wire.open(redis_server.url, 5.0, lambda _: None)
    await load_scripts(wire)
    pool.attach(wire)
    await drained(pool)
    assert await client.zrevrange(KEYS.held(placed.replica), 0, -1) == chain(1, 2)
    assert await numbers(client, KEYS.active) == {placed.replica: 1}
    pool.detach()
    await wire.close()


async def test_placing_without_a_connection_fails_before_anything_is_awaited(pool: Pool) -> None:
    pool.detach()
    with pytest.raises(StoreDown):
        pool.place(request("a", chain(1))).send(None)
