"""The queue when attempts fail, clients leave, gateways die, and the store breaks, hangs or is emptied."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
import pytest
import redis.asyncio as redis

from coordinator.errors import StoreDown, StoreError, StoreRefused
from coordinator.placement import Placement, Reservation
from coordinator.pool import seats
from coordinator.redis.wire import Wire
from coordinator.scripts import signature
from tests.coordinator.queueing import asking, fill, queued, two_gateways, waiting
from tests.coordinator.stage import KEYS, beaten, chain, drained
from tests.polling import eventually
from tests.redis_server import RedisServer


async def test_the_room_that_a_failed_attempt_leaves_goes_to_who_waits_for_it(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        [first, second, *_] = await fill(one)
        failed = one.live[first].replica
        task = await queued(client, other, asking("waits", pinned=failed))
        one.done(second)
        assert await one.place(asking("retry", tried=(failed,), release=first)) is not None
        placement = await task
        assert placement is not None
        assert placement.replica == failed


async def test_a_client_that_leaves_frees_its_seat_or_what_it_was_granted(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        full = await fill(one)
        left = await queued(client, other, asking("left"))
        next_one = await queued(client, other, asking("next"))
        left.cancel()

        async def is_alone() -> bool:
            return await waiting(client) == 1

        await eventually(is_alone)
        one.done(full[0])
        assert await next_one is not None
        granted = await queued(client, other, asking("granted"))
        other.done("next")
        one.settlements.send()
        other.settlements.send()
        granted.cancel()  # while its grant is on the way
        last = await other.place(asking("last"))
        assert last is not None
        await drained(one, other)
        assert set(await client.hgetall(KEYS.flight("gw1"))) == {"last"}


async def test_a_grant_that_a_broken_connection_did_not_bring_is_heard_on_the_next(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        [full, *_] = await fill(one)
        task = await queued(client, other, asking("late"))
        for each in await client.client_list():
            if each["cmd"] == "blmove":
                await client.client_kill_filter(_id=each["id"])
        one.done(full)
        assert await task is not None


@pytest.mark.parametrize("damage", ["seats are deleted", "heard is no list", "line is deleted"])
async def test_a_damaged_queue_is_mended_by_heartbeats(
    redis_server: RedisServer, client: redis.Redis, damage: str
) -> None:
    async with two_gateways(redis_server) as (one, other):
        [full, *_] = await fill(one)
        if damage == "heard is no list":
            await client.set(KEYS.heard("gw1"), "garbage")
        task = await queued(client, other, asking("late"))
        if damage == "seats are deleted":
            await client.delete(KEYS.seats("gw1"))
        elif damage == "line is deleted":
            [queue] = await client.hkeys(KEYS.waiting)
            await client.delete(f"kvgate:{{m}}:line:{queue} -")
        one.done(full)

        async def is_granted() -> bool:
            await asyncio.gather(beaten(one), beaten(other))
            return task.done()

        await eventually(is_granted)
        assert (await task) is not None


async def test_a_seat_that_another_version_keeps_in_another_form_is_placed_again(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        [full, *_] = await fill(one)
        task = await queued(client, other, asking("late"))
        seat = orjson.loads(str(await client.hget(KEYS.seats("gw1"), "late")))
        seat["settings"]["layout"] = "another"
        seat["argv"][[one.name for one in signature("place").args].index("prompt_tokens")] = "1"
        await client.hset(KEYS.seats("gw1"), "late", orjson.dumps(seat).decode())
        one.done(full)
        placement = await task
        assert placement is not None
        assert placement.backlog_tokens == asking("late").prompt_tokens > 1


async def test_what_was_learned_while_a_request_waited_is_a_hit_though_its_first_key_is_unknown(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server, 1) as (one, other):
        [full] = await fill(one, 1)
        first, tip = chain("new", "known")
        task = await queued(client, other, asking("late", keys=[first, tip]))
        await client.hset(KEYS.own(tip), "r0", "life1 claim gpu 7 0 1 -")
        one.done(full)
        placement = await task
        assert placement is not None
        assert (placement.why, placement.matched_keys) == ("hit", 2)


async def test_an_old_answer_does_not_answer_a_request_that_was_placed_again(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        [full, *_] = await fill(one)
        task = await queued(client, other, asking("late"))
        await client.delete(KEYS.subsets)
        await beaten(one)  # grants "undeclared", so the request is placed again

        async def is_declared() -> bool:
            return bool(await client.exists(KEYS.subsets)) and await waiting(client) == 1

        await eventually(is_declared)
        one.done(full)
        assert await task is not None


async def test_a_gateway_that_leaves_leaves_nothing(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        [full, *_] = await fill(one)
        task = await queued(client, other, asking("late"))
        one.done(full)
        await task
        other.live.clear()
        await other.leave()
        left = [KEYS.seats("gw1"), KEYS.charges("gw1"), KEYS.grants("gw1"), KEYS.heard("gw1"), KEYS.flight("gw1")]
        assert await client.exists(*left) == 0


async def test_without_the_right_to_hear_of_grants_requests_do_not_wait(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async def refused(_on_broken: Callable[[StoreError], None]) -> Wire:
        raise StoreRefused("NOPERM this user has no permissions to run the 'blmove' command")

    async with two_gateways(redis_server) as (one, other):
        await fill(one)
        other.seats._connect = refused
        with pytest.raises(StoreDown):  # then it is placed without the store
            await other.place(asking("first"))
        assert await other.place(asking("second")) is not None
        await drained(other)
        assert await waiting(client) == 0


async def test_an_emptied_store_gets_its_queue_back_in_order(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        await fill(one)
        tasks = [await queued(client, other, asking(name)) for name in ("first", "second", "third")]
        await client.flushall()
        for pool in (one, other):
            await beaten(pool)  # it finds that the store has forgotten it

        async def are_waiting() -> bool:
            return await waiting(client) == 3

        await eventually(are_waiting)
        for name, task in zip(list(one.live), tasks, strict=True):
            assert sum(each.done() for each in tasks) == tasks.index(task)
            one.done(name)
            await beaten(one)  # if the store does not know its request yet, only a heartbeat gives its room away
            assert await task is not None


async def test_a_request_that_its_gateway_placed_without_the_store_has_no_seat_when_that_is_back(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "_AWAY_S", 0.0)
    async with two_gateways(redis_server) as (one, other):
        [full, *_] = await fill(one)
        tasks = {name: await queued(client, other, asking(name)) for name in ("taken", "left", "kept")}
        wire, away = other.link.wire, asyncio.Event()
        other.seats.on_away = away.set
        other.detach()
        await away.wait()
        assert other.seats.is_away
        assert [each.reservation for each in other.seats.requests()] == [*tasks]
        for name in ("taken", "left"):
            reservation = Reservation(name, "r0", "life1", 100, "-")
            other.adopt(reservation)
            other.seats.take(reservation)
        tasks["left"].cancel()  # in the turn in which it was placed
        assert await tasks["taken"] is other.live["taken"]
        await asyncio.wait([tasks["left"]])
        assert other.load.requests == {"r0": 1}
        assert wire is not None
        other.attach(wire)
        await drained(other)
        assert set(await client.hgetall(KEYS.seats("gw1"))) == {"kept"}
        assert set(await client.hgetall(KEYS.flight("gw1"))) == {"taken"}
        assert not other.seats.is_away
        one.done(full)
        assert isinstance(await tasks["kept"], Placement | None)


@pytest.mark.parametrize(("was_placed", "was_deaf"), [(True, False), (True, True), (False, False)])
async def test_a_grant_that_nobody_wants_when_the_store_is_back_claims_nothing(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, was_placed: bool, was_deaf: bool
) -> None:
    """Also if it is heard after the request that was placed without the store was counted: `was_deaf`."""
    monkeypatch.setattr(seats, "_AWAY_S", 0.0)
    async with two_gateways(redis_server) as (one, other):
        [full, *_] = await fill(one)
        task, tip = await queued(client, other, asking("gone")), chain("gone")[-1]
        wire, away = other.link.wire, asyncio.Event()
        other.seats.on_away = away.set
        other.detach()
        await away.wait()
        if was_deaf:
            assert other.seats._listener is not None
            other.seats._listener.cancel()
            await asyncio.wait([other.seats._listener])
        if was_placed:
            reservation = Reservation("gone", "r1", "life1", 100, "-")
            other.adopt(reservation)
            other.seats.take(reservation)
        else:
            task.cancel()
        await asyncio.wait([task])
        one.done(full)
        await drained(one)
        assert await client.exists(KEYS.own(tip)) == 1, "its seat was granted"
        assert wire is not None
        other.attach(wire)

        async def is_forgotten() -> bool:
            return await client.exists(KEYS.own(tip)) == 0

        await eventually(is_forgotten)
        await beaten(other)
        assert (len(await client.hgetall(KEYS.flight("gw1"))), len(other.live)) == (was_placed, was_placed)
        other.done("gone")
        await beaten(other)
        await drained(other)
        assert await client.exists(KEYS.flight("gw1")) == 0
