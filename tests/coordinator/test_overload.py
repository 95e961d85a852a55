"""An overloaded store is asked for less: late placements change nothing there, few are under way, and what fell back is
counted once a heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreDown, StoreError, StoreLate, StoreRefused
from coordinator.placement import Placement, PlaceRequest, Reservation
from coordinator.pool.placing_window import MOST, PlacingWindow
from coordinator.pool.pool import Pool
from coordinator.redis.wire import Wire, load_scripts
from tests.coordinator.stage import (
    KEYS,
    calls_of,
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
from tests.redis_server import RedisServer

BUDGET_S = 0.03


@pytest.fixture
async def pool(redis_server: RedisServer, client: redis.Redis) -> AsyncIterator[Pool]:
    """A pool that knows Redis' time. It has placed once, so the next placement declares nothing."""
    async with joined(redis_server.url, budget_s=5.0) as pool:
        await register(pool, 2)
        await place(pool, "warm up", [])
        pool.done("warm up")
        await pool.beat()
        pool.placer.budget_s = BUDGET_S
        wire = pool.link.wire
        yield pool
        if pool.link.wire is not wire:
            await lose_connection(pool)


async def lose_connection(pool: Pool) -> None:
    wire = pool.link.wire
    assert wire is not None
    pool.detach()
    await wire.close("cut")


async def connect(pool: Pool, server: RedisServer) -> None:
    wire = await Wire.open(server.url, 5.0, lambda _: None)
    await load_scripts(wire)
    pool.attach(wire)


async def fall_back(pool: Pool, server: RedisServer, reservation: str) -> None:
    """A late placement on r0 without a deadline, whose request then goes to r1. Afterwards Redis runs again, and
    nobody has read its reply."""
    pool.clock.forget()
    with standing_still(server):
        with pytest.raises(StoreLate):
            await pool.place(request(reservation, chain(1, 2), pinned="r0"))
        pool.adopt(Reservation(reservation, "r1", "life1", 200, chain(1, 2)[-1]))


async def load_of(client: redis.Redis) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Requests in flight, backlogs, and reservations."""
    flight = sorted(await hash_of(client, KEYS.flight("gw0")))
    return await numbers(client, KEYS.active), await numbers(client, KEYS.backlog_tokens), flight


async def test_a_placement_that_redis_begins_after_its_deadline_changes_nothing(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    before = await dump(client)
    with standing_still(redis_server), pytest.raises(StoreLate):
        await pool.place(request("late", chain(1, 2)))
    await drained(pool)
    assert await dump(client) == before
    assert await chain_of(client, chain(1, 2)[-1]) is None
    assert (await place(pool, "next", chain(1, 2))).why == "cold"


@pytest.mark.parametrize(("lag_s", "is_made"), [(0.0, False), (1.0, True)])
async def test_a_process_that_was_late_itself_gives_redis_more_time(
    pool: Pool, redis_server: RedisServer, lag_s: float, is_made: bool
) -> None:
    """Redis stands still for longer than the budget, and for less than a placement may take in all."""
    pool.placer.budget_s = 0.3
    pool.placer.lag.heard(lag_s)
    with standing_still(redis_server):
        placing = asyncio.ensure_future(pool.place(request("a", chain(1))))
        await asyncio.sleep(0.5)
    [placed] = await asyncio.gather(placing, return_exceptions=True)
    assert isinstance(placed, Placement) == is_made
    assert is_made or (isinstance(placed, StoreLate) and placed.cause == "redis")
    pool.done("a")


async def test_only_some_placements_are_sent_at_once_and_others_fall_back_unsent(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    await client.config_resetstat()
    with standing_still(redis_server):
        placing = [asyncio.ensure_future(pool.place(request(f"id{i}", chain(i)))) for i in range(MOST + 20)]
        results = await asyncio.gather(*placing, return_exceptions=True)
        assert {type(result) for result in results} == {StoreLate}
        assert len(pool.reservations.unanswered) == MOST
        with pytest.raises(StoreLate, match="unanswered"):
            await pool.place(request("one more", chain(1)))
    await drained(pool)
    assert (await calls_of(client))["evalsha"] == MOST
    assert (pool.reservations.unanswered, pool.placer.window.taken) == ({}, 0)


async def ended(pool: Pool, client: redis.Redis, server: RedisServer, how: str) -> list[Placement | BaseException]:
    """More placements than the window has room for, all of which end in this way."""
    if how == "refused":
        await client.set(KEYS.gateways, "no hash")
    with standing_still(server):
        placing = [asyncio.ensure_future(pool.place(request(f"id{i}", chain(i)))) for i in range(MOST + 20)]
        await asyncio.sleep(0)
        if how == "late":
            await asyncio.wait(placing)
        elif how == "cancelled":
            for one in placing:
                one.cancel()
        elif how == "lost":
            await lose_connection(pool)
    results = await asyncio.gather(*placing, return_exceptions=True)
    if how == "refused":
        await client.delete(KEYS.gateways)
    return [result for result in results if result is not None]


@pytest.mark.parametrize(
    ("how", "error"),
    [("late", StoreLate), ("refused", StoreRefused), ("lost", StoreDown), ("cancelled", asyncio.CancelledError)],
)
async def test_no_place_in_the_window_is_lost_however_placements_end(
    pool: Pool, client: redis.Redis, redis_server: RedisServer, how: str, error: type[BaseException]
) -> None:
    if how != "late":
        pool.placer.budget_s = 5.0
    results = await ended(pool, client, redis_server, how)
    assert {type(result) for result in results} == {error}
    if how == "lost":
        await connect(pool, redis_server)
    await drained(pool)
    assert (pool.reservations.unanswered, pool.placer.window.taken, len(pool.placer.window._waiting)) == ({}, 0, 0)
    pool.placer.budget_s = 5.0
    assert (await place(pool, "next", chain(1))).why == "cold"
    pool.done("next")
    await drained(pool)
    assert await load_of(client) == ({}, {}, [])


async def test_placements_that_wait_are_sent_in_order(pool: Pool) -> None:
    pool.placer.budget_s, pool.placer.window.limit = 5.0, 1.0
    ended: list[str] = []

    async def placed(reservation: str) -> None:
        await place(pool, reservation, chain(reservation))
        ended.append(reservation)

    waiting = [asyncio.ensure_future(placed(f"id{i}")) for i in range(5)]
    await asyncio.sleep(0)
    waiting[2].cancel()
    await asyncio.wait(waiting)
    assert ended == ["id0", "id1", "id3", "id4"]


async def test_a_window_shrinks_when_placements_are_late_and_grows_again(pool: Pool, redis_server: RedisServer) -> None:
    causes: list[str] = []
    with standing_still(redis_server):
        while "redis" not in causes:  # a busy test may be late itself
            with pytest.raises(StoreLate) as late:
                await pool.place(request(f"late{len(causes)}", chain(1)))
            causes.append(late.value.cause)
    assert pool.placer.window.limit == MOST / 2
    await drained(pool)
    pool.placer.budget_s = 5.0
    await place(pool, "next", chain(1))
    assert pool.placer.window.limit > MOST / 2


async def test_what_fell_back_is_counted_in_one_call_with_the_next_heartbeat(pool: Pool, client: redis.Redis) -> None:
    epoch = pool.link.epoch
    await client.config_resetstat()
    for i in range(20):
        pool.adopt(Reservation(f"id{i}", f"r{i % 2}", "life1", 100, "-"))
    pool.first_token("id0")
    pool.done("id1")
    await drained(pool)
    assert not {"eval", "evalsha"} & (await calls_of(client)).keys()
    await pool.beat()
    assert (await calls_of(client))["eval"] == 1
    assert pool.link.epoch == epoch + 1
    active, backlogs, flight = await load_of(client)
    assert active == {"r0": 10, "r1": 9}
    assert backlogs == {"r0": 900, "r1": 900}
    assert len(flight) == 19


async def test_what_fell_back_is_settled_in_one_call_with_a_heartbeat(pool: Pool, client: redis.Redis) -> None:
    for i in range(20):
        pool.adopt(Reservation(f"id{i}", f"r{i % 2}", "life1", 100, "-"))
    await pool.beat()
    await client.config_resetstat()
    for i in range(20):
        pool.first_token(f"id{i}")
        pool.done(f"id{i}")
    await drained(pool)
    assert "evalsha" not in await calls_of(client)
    await pool.beat()
    assert (await calls_of(client))["evalsha"] == 2, "a settle and the beat"
    assert await load_of(client) == ({}, {}, [])
    assert not pool.settlements._adopted


async def test_a_late_placement_counts_for_nothing_until_its_request_is_adopted(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    await fall_back(pool, redis_server, "a")
    await drained(pool)
    assert await load_of(client) == ({}, {}, [])
    await pool.beat()
    assert await load_of(client) == ({"r1": 1}, {"r1": 200}, ["a"])
    assert await dump(client, "*:own:*", "*:held:*") == {}


@pytest.mark.parametrize(
    "steps", ["beat", "first beat", "beat first beat", "reassert beat", "lost beat", "beat reassert"]
)
async def test_a_request_that_fell_back_is_counted_once_whatever_happens_around_its_adoption(
    pool: Pool, client: redis.Redis, redis_server: RedisServer, steps: str
) -> None:
    """The late reply is under way when the first step begins."""
    await fall_back(pool, redis_server, "a")
    for step in steps.split():
        if step == "first":
            pool.first_token("a")
        elif step == "reassert":
            pool.reassert()
        elif step == "beat":
            await pool.beat()
        else:
            await lose_connection(pool)
            await connect(pool, redis_server)
    await drained(pool)
    pool.reservations.count_adopted()  # the first step did not, if nobody had read the late reply
    await drained(pool)
    assert await load_of(client) == ({"r1": 1}, {} if "first" in steps else {"r1": 200}, ["a"])
    assert await dump(client, "*:own:*", "*:held:*") == {}
    pool.done("a")
    await pool.beat()
    assert await load_of(client) == ({}, {}, [])


@pytest.mark.parametrize("reply_first", [True, False])
async def test_a_request_that_is_over_before_its_adoption_leaves_nothing(
    pool: Pool, client: redis.Redis, redis_server: RedisServer, reply_first: bool
) -> None:
    await fall_back(pool, redis_server, "a")
    if reply_first:
        await drained(pool)
    pool.done("a")
    await pool.beat()
    await drained(pool)
    assert await load_of(client) == ({}, {}, [])
    assert await dump(client, "*:own:*", "*:held:*") == {}
    assert (pool.live, pool.settlements.to_adopt, pool.settlements._adopted) == ({}, set(), set())


async def test_paused_placements_fail_at_once_and_everything_else_goes_on(pool: Pool, client: redis.Redis) -> None:
    await place(pool, "a", chain(1), pinned="r0")
    pool.link.is_paused = True
    with pytest.raises(StoreError, match="paused"):
        pool.place(request("b", chain(1))).send(None)
    pool.adopt(Reservation("b", "r1", "life1", 200, "-"))
    pool.done("a")
    assert (await pool.beat()).known
    assert await load_of(client) == ({"r1": 1}, {"r1": 200}, ["b"])


async def test_a_request_that_a_reassertion_has_counted_is_settled(pool: Pool, client: redis.Redis) -> None:
    pool.adopt(Reservation("a", "r1", "life1", 200, "-"))
    pool.reassert()
    pool.done("a")
    await pool.beat()
    assert await load_of(client) == ({}, {}, [])


@pytest.mark.parametrize("count", ["count_adopted", "reassert"])
async def test_a_request_that_is_counted_in_the_very_turn_of_its_late_reply_stays_counted(
    pool: Pool, client: redis.Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    undo = pool.placer.undo_late

    def undo_and_count(late: PlaceRequest, reply: Any) -> None:
        undo(late, reply)
        (pool.reassert if count == "reassert" else pool.reservations.count_adopted)()

    monkeypatch.setattr(pool.placer, "undo_late", undo_and_count)
    await fall_back(pool, redis_server, "a")
    await drained(pool)
    assert await load_of(client) == ({"r1": 1}, {"r1": 200}, ["a"])


async def test_a_place_in_the_window_is_not_lost_if_a_refused_placement_is_cancelled_in_the_turn_of_its_reply(
    pool: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.placer.budget_s = 5.0
    wire = pool.link.wire
    assert wire is not None
    answer = wire._answer
    await client.set(KEYS.gateways, "no hash")
    placing = asyncio.ensure_future(pool.place(request("cancelled", chain(1))))
    with monkeypatch.context() as patch:
        patch.setattr(wire, "_answer", lambda call, reply: (answer(call, reply), placing.cancel()))
        await asyncio.wait([placing])
    assert placing.cancelled()
    assert (pool.reservations.unanswered, pool.placer.window.taken) == ({}, 0)
    await client.delete(KEYS.gateways)


async def test_a_place_in_the_window_is_not_lost_if_its_taker_is_cancelled_in_the_turn_in_which_it_gets_it() -> None:
    window = PlacingWindow(1.0)
    window.limit = 1.0
    assert window.take()
    waiting = asyncio.ensure_future(window.wait(60, asyncio.get_running_loop().time() + 60))
    await asyncio.sleep(0)
    window.give_back()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert window.taken == 0


async def test_a_place_in_the_window_goes_to_nobody_whose_time_is_over() -> None:
    """On a busy event loop, timers come late. Each of many waiters would hold a place that others could use."""
    window = PlacingWindow(1.0)
    window.limit = 1.0
    assert window.take()
    now_s = asyncio.get_running_loop().time()
    waiting = [asyncio.ensure_future(window.wait(60, now_s + patience_s)) for patience_s in (0.01, 0.01, 60)]
    await asyncio.sleep(0)
    while asyncio.get_running_loop().time() < now_s + 0.02:
        pass
    window.give_back()
    late, as_late, in_time = await asyncio.gather(*waiting, return_exceptions=True)
    assert (type(late), type(as_late), in_time, window.taken) == (StoreLate, StoreLate, None, 1)
