"""Requests that find no room wait in one queue for all gateways, and are granted in turn."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace

import orjson
import pytest
import redis.asyncio as redis

from coordinator.errors import NoRoom
from coordinator.placement import Placement, PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.pool.queue_view import read_queue
from coordinator.registry import ReplicaRecord
from coordinator.subset import Subset
from tests.coordinator.queueing import ONE_EACH, asking, fill, queued, two_gateways, waiting
from tests.coordinator.stage import KEYS, beaten, chain, drained
from tests.polling import eventually
from tests.redis_server import RedisServer


async def test_a_request_without_room_waits_for_the_one_that_ends_on_another_gateway(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        full = await fill(one)
        task = await queued(client, other, asking("late"))
        assert not task.done()
        assert orjson.loads((await client.hgetall(KEYS.seats("gw1")))["late"])["tenant"] == "-"
        freed = one.live[full[1]].replica
        one.done(full[1])
        placement = await task
        assert placement is not None
        assert placement.replica == freed
        assert other.live["late"].replica == freed
        assert set(await client.hgetall(KEYS.flight("gw1"))) == {"late"}
        assert await client.hgetall(KEYS.active) == {"r0": "1", "r1": "1", "r2": "1"}
        other.done("late")
        await drained(other)
        assert await client.exists(KEYS.waiting, KEYS.seats("gw1"), KEYS.fair, KEYS.charges("gw1")) == 0


async def test_tenants_take_turns_whatever_they_ask_for_and_bands_go_first(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        full = await fill(one)
        order: list[str] = []
        tasks = []
        for name, pool, turn in [
            ("greedy0", one, {"band": 1, "tenant": "greedy"}),
            ("greedy1", other, {"band": 1, "tenant": "greedy"}),
            ("greedy2", one, {"band": 1, "tenant": "greedy"}),
            ("modest", other, {"band": 1, "tenant": "modest"}),
            ("double0", one, {"band": 1, "tenant": "double", "weight": 2.0}),
            ("double1", one, {"band": 1, "tenant": "double", "weight": 2.0}),
            ("urgent", other, {"band": 0, "tenant": "greedy"}),
        ]:
            task = await queued(client, pool, asking(name, **turn))
            task.add_done_callback(lambda _, name=name: order.append(name))
            tasks.append((name, pool, task))
        one.done(full[0])
        for count in range(1, len(tasks) + 1):
            await eventually(lambda count=count: len(order) == count)
            _, pool, _ = next(each for each in tasks if each[0] == order[-1])
            pool.done(order[-1])
        assert order[0] == "urgent"
        assert set(order[1:4]) == {"greedy0", "modest", "double0"}
        assert order[4:] == ["double1", "greedy1", "greedy2"], "each charged with its tokens, the double ones half"


async def test_a_tenant_that_comes_late_takes_turns_from_then_on_and_catches_up_on_nothing(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        [first, *_] = await fill(one)
        order: list[str] = []
        tasks = []

        async def wait(pool: Pool, tenant: str, count: int) -> None:
            for name in (f"{tenant}{number}" for number in range(count)):
                tasks.append(await queued(client, pool, asking(name, tenant=tenant)))
                tasks[-1].add_done_callback(lambda _, name=name: order.append(name))

        await wait(one, "early", 6)
        one.done(first)
        for count in range(1, 10):
            await eventually(lambda count=count: len(order) == count)
            if count == 3:
                await wait(other, "late", 3)
            (one if order[-1].startswith("early") else other).done(order[-1])
        assert order[3:] == ["late0", "early3", "late1", "early4", "late2", "early5"]


async def test_nobody_overtakes_but_requests_that_others_cannot_use_do(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        [first, *_] = await fill(one)
        busy = one.live[first].replica
        pinned = await queued(client, one, asking("pinned", pinned=busy))
        one.done(next(name for name in one.live if one.live[name].replica != busy))
        free = await other.place(asking("elsewhere"))
        assert free is not None
        assert free.replica != busy, "the one that waits for another replica does not block it"
        behind = await queued(client, other, asking("behind"))
        one.done(first)
        placement = await pinned
        assert placement is not None
        assert placement.replica == busy
        assert not behind.done()
        one.done("pinned")
        assert await behind is not None


async def test_requests_that_wait_use_a_replica_that_comes_later_and_nobody_overtakes_them_there(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        [first, *_] = await fill(one)
        pinned = await queued(client, one, asking("pinned", pinned=one.live[first].replica))
        many = [await queued(client, one, asking(f"many{each}", tenant="many")) for each in range(40)]
        few = await queued(client, other, asking("few", tenant="few"))
        one.register(ReplicaRecord("r3", "life1", "ready", 0, 0, "http://r3"))
        await asyncio.gather(beaten(one), beaten(other))
        assert "r3" in other.records
        one.replicas_changed(lambda asked: None if asked.pinned else Subset.of(one.records))
        granted = await many[0]
        assert granted is not None
        assert granted.replica == "r3"
        other.replicas_changed(lambda _: Subset.of(one.records))
        late = await queued(client, other, asking("late", tenant="late"))
        one.done("many0")
        granted = await few
        assert granted is not None
        assert granted.replica == "r3"
        assert not late.done()
        assert not pinned.done()
        old, new = Subset.of(["r0", "r1", "r2"]).digest, Subset.of(one.records).digest
        assert await client.hgetall(KEYS.waiting) == {f"0 {new}": "40", f"0 {old}/{one.live[first].replica}": "1"}
        left = pinned, late, *many[1:]
        for each in left:
            each.cancel()
        await asyncio.wait(left)
        await drained(one, other)
        assert not [key for key in await client.keys() if ":line:" in key or ":turns:" in key or ":waiting" in key]


async def test_a_request_that_was_held_longer_than_it_may_wait_for_room_gets_a_seat(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    knobs = PolicyKnobs(max_active_requests=1, max_waiting=2, max_waiting_per_tenant=1)
    async with two_gateways(redis_server) as (one, other):
        [full, *_] = await fill(one)
        since_ms = one.clock.time_ms(time.monotonic() - 180)
        held = [
            await queued(client, one, asking(f"held{each}", knobs, since_ms=since_ms + each, wait_ms=60_000))
            for each in range(3)
        ]
        with pytest.raises(NoRoom):
            await other.place(asking("new", knobs))
        for at, task in enumerate(held):
            one.done(f"held{at - 1}" if at else full)
            assert await task is not None


async def test_requests_that_wait_are_not_thrown_at_a_replica_that_has_failed(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server, 1) as (one, other):
        await fill(one, 1)
        tasks = [await queued(client, other, asking(f"waits{each}")) for each in range(3)]
        await one.register(ReplicaRecord("r0", "life1", "dead", 0, 0, "http://r0"))
        await asyncio.gather(beaten(one), beaten(other))
        await drained(one, other)
        assert await client.hget(KEYS.active, "r0") == "1"
        assert await waiting(client) == 3
        await one.register(ReplicaRecord("r0", "life2", "ready", 0, 0, "http://r0"))
        for each, task in enumerate(tasks):
            assert await task is not None
            other.done(f"waits{each}")


async def test_many_retries_do_not_hide_the_one_who_can_use_the_room(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        [first, second, *_] = await fill(one)
        failed = one.live[first].replica
        retries = [await queued(client, one, asking(f"retry{number}", tried=(failed,))) for number in range(17)]
        behind = await queued(client, other, asking("behind"))
        one.done(first)
        placement = await behind
        assert placement is not None
        assert placement.replica == failed
        assert not any(each.done() for each in retries)
        one.done(second)
        assert await retries.pop(0) is not None
        for each in retries:
            each.cancel()
        await asyncio.wait(retries)


async def test_room_is_granted_however_many_queues_there_are(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server, 70) as (one, other):
        full = await fill(one, 70)
        *busy, free = full
        pinned = [await queued(client, other, asking(name, pinned=one.live[name].replica)) for name in busy]
        anywhere = await queued(client, other, asking("anywhere"))
        one.done(free)
        assert await anywhere is not None
        for each in pinned:
            each.cancel()
        await asyncio.wait(pinned)


async def test_a_request_that_may_wait_no_longer_is_refused(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        await fill(one)
        first = await queued(client, one, asking("first"))
        with pytest.raises(NoRoom) as refused:
            await other.place(asking("second", wait_ms=50))
        assert refused.value.reason == "waited"

        async def is_alone() -> bool:
            return await waiting(client) == 1

        await eventually(is_alone)
        first.cancel()


async def test_a_lower_band_takes_no_place_in_the_queue_and_queues_count_together_for_a_tenant(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    knobs = PolicyKnobs(max_active_requests=1, max_waiting=2, max_waiting_per_tenant=2)
    async with two_gateways(redis_server) as (one, other):
        [first, second, *_] = await fill(one)
        batch = [await queued(client, one, asking(f"batch{i}", knobs, band=2, tenant=f"b{i}")) for i in range(2)]
        urgent = await queued(client, other, asking("urgent", knobs))
        for each in (*batch, urgent):
            each.cancel()
        await asyncio.wait([*batch, urgent])
        await drained(one, other)
        knobs = replace(knobs, max_waiting=100)
        of_one = [
            await queued(client, one, asking(f"of {name}", knobs, pinned=one.live[name].replica, band=1, tenant="t"))
            for name in (first, second)
        ]
        with pytest.raises(NoRoom) as refused:
            await other.place(asking("third", knobs, band=2, tenant="t"))
        assert refused.value.reason == "full_tenant"
        for each in of_one:
            each.cancel()
        await asyncio.wait(of_one)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        await fill(one)
        first = await queued(client, one, asking("first"))
        [(queue, _)] = (await client.hgetall(KEYS.paces)).items()
        await client.hset(KEYS.paces, queue, "1 5000.000 8")
        with pytest.raises(NoRoom) as refused:
            await other.place(asking("second", wait_ms=9000))
        assert (refused.value.reason, refused.value.expected_s) == ("unreachable", 10.0)
        first.cancel()


async def test_a_lower_band_leaves_a_part_of_the_room_and_does_not_starve(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    knobs = PolicyKnobs(max_active_requests=5)
    async with two_gateways(redis_server, 1) as (one, other):
        for number in range(4):
            await one.place(asking(f"batch{number}", knobs, 0.8, band=2))
        batch = await queued(client, other, asking("batch4", knobs, 0.8, band=2, starve_ms=1))
        [line], [room] = await read_queue(one, 5, 0, 1.0, [1, 1, 0.8])
        assert (line.why, room.has_room) == ("room_share", True)
        assert await one.place(asking("urgent0", knobs)) is not None, "there is room for a higher band"
        urgent = await queued(client, one, asking("urgent1", knobs))
        one.done("batch0")  # all other slots stay taken: there is no room for a part of it
        assert await batch is not None, "its band has got nothing for its time"
        assert not urgent.done()
        one.done("batch1")
        assert await urgent is not None


async def test_room_is_measured_in_seconds_of_prefill_too(redis_server: RedisServer, client: redis.Redis) -> None:
    knobs = PolicyKnobs(max_wait_s=2, prefill_tokens_per_s=100)
    async with two_gateways(redis_server) as (one, other):
        for number in range(3):
            placement = await one.place(asking(f"long{number}", knobs, prompt_tokens=1000))
            assert placement is not None, "a long prompt gets its turn, too"
        task = await queued(client, other, asking("short", knobs))
        one.first_token("long1")
        assert await task is not None
        await client.hset(KEYS.rates, one.live["long0"].replica, "1000")
        assert await other.place(asking("more", knobs)) is not None, "this replica computes faster than assumed"


async def three_behind_a_long_one(
    client: redis.Redis, one: Pool, other: Pool, prompt_tokens: int
) -> list[asyncio.Task[Placement | None]]:
    """Requests that wait until the replica's prompts ahead take less than 2 s."""
    knobs = PolicyKnobs(max_wait_s=2, prefill_tokens_per_s=100)
    assert await one.place(asking("long", knobs, prompt_tokens=1000)) is not None
    return [await queued(client, other, asking(f"waits{i}", knobs, prompt_tokens=prompt_tokens)) for i in range(3)]


async def test_the_end_of_a_long_prompt_makes_room_for_all_that_fit(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server, replicas=1) as (one, other):
        tasks = await three_behind_a_long_one(client, one, other, prompt_tokens=100)
        one.first_token("long")
        assert await tasks[0] is not None
        assert await tasks[1] is not None
        assert await waiting(client) == 1, "the two take the two seconds of work that may be ahead"
        other.first_token("waits0")
        assert await tasks[2] is not None


async def test_as_many_are_granted_at_once_as_a_fast_replica_computes(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server, replicas=1) as (one, other):
        tasks = await three_behind_a_long_one(client, one, other, prompt_tokens=600)
        await client.hset(KEYS.rates, "r0", "1000")
        one.first_token("long")
        assert all([await task is not None for task in tasks])


async def test_a_request_that_computes_nothing_never_waits(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        await fill(one)
        assert await other.place(asking("tokenize", share=0.0)) is not None
        assert await waiting(client) == 0


PATIENT = replace(ONE_EACH, prefill_tokens_per_s=1.0, max_wait_s=0.0)
"""To compute a token anew takes so long that a request waits for those who hold its prompt."""


@pytest.mark.parametrize("tenant", ["-", "other"])
async def test_a_request_waits_a_while_for_the_replica_that_holds_its_prompt_and_holds_up_nobody(
    redis_server: RedisServer, client: redis.Redis, tenant: str
) -> None:
    async with two_gateways(redis_server) as (one, other):
        full = await fill(one)
        holder, elsewhere = one.live[full[0]].replica, one.live[full[1]].replica
        held = chain("full0")
        waits = await queued(client, other, asking("continues", PATIENT, keys=[*held, *chain("more")]))
        behind = await queued(client, other, asking("new", PATIENT, tenant=tenant))
        one.done(full[1])
        async with asyncio.timeout(5):
            placement = await behind
        assert placement is not None
        assert placement.replica == elsewhere
        other.done("new")
        await drained(one, other)
        await other.beat()
        assert not waits.done(), "there is room elsewhere"
        one.done(full[0])
        async with asyncio.timeout(5):
            placement = await waits
        assert placement is not None
        assert (placement.replica, placement.matched_keys) == (holder, 1)


@pytest.mark.parametrize("why", ["it has waited long enough", "nobody holds it any more"])
async def test_then_it_goes_where_there_is_room(redis_server: RedisServer, client: redis.Redis, why: str) -> None:
    knobs = replace(PATIENT, prefill_tokens_per_s=1e9) if why == "it has waited long enough" else PATIENT
    async with two_gateways(redis_server) as (one, other):
        full = await fill(one)
        elsewhere = one.live[full[1]].replica
        waits = await queued(client, other, asking("continues", knobs, keys=[*chain("full0"), *chain("more")]))
        if why == "nobody holds it any more":
            await client.delete(KEYS.own(chain("full0")[0]))
        one.done(full[1])
        async with asyncio.timeout(5):
            placement = await waits
        assert placement is not None
        assert placement.replica == elsewhere


async def test_it_also_waits_for_its_holder_while_others_have_room_but_not_too_many_do(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    prefix = chain(*range(40))
    async with two_gateways(redis_server) as (one, other):
        first = await one.place(asking("first", PATIENT, keys=prefix))
        assert first is not None
        one.first_token("first")
        await drained(one)
        waits = [
            await queued(client, other, asking(f"continues{i}", PATIENT, keys=[*prefix, *chain(f"more {i}")]))
            for i in range(2)
        ]
        elsewhere = await one.place(asking("new", PATIENT))
        assert elsewhere is not None
        assert elsewhere.replica != first.replica, "those who wait for their holder hold up nobody"
        [line], _ = await read_queue(one, 1, 0, 1.0)
        assert (line.why, line.requests) == ("prefers", 2)
        told = orjson.loads(await one.explain(asking("asked", PATIENT, keys=prefix)) or b"")
        assert told["waits"]["why"] == "prefers"
        one.done("first")
        async with asyncio.timeout(5):
            placement = await waits[0]
        assert placement is not None
        assert (placement.replica, placement.matched_keys) == (first.replica, len(prefix))
        for task in waits:
            task.cancel()


@pytest.mark.parametrize("prefixes", [1, 3])
@pytest.mark.parametrize("tenants", [1, 12])
async def test_however_many_want_what_a_full_replica_holds_no_other_stays_idle(
    redis_server: RedisServer, client: redis.Redis, prefixes: int, tenants: int
) -> None:
    knobs = replace(PATIENT, max_active_requests=prefixes)
    async with two_gateways(redis_server) as (one, other):
        held = [chain("the same", f"prefix {i}", *range(40)) for i in range(prefixes)]
        for i, keys in enumerate(held):
            assert await one.place(asking(f"first{i}", knobs, keys=keys, pinned="r0")) is not None
            one.first_token(f"first{i}")
        await drained(one)
        crowd = [
            asyncio.ensure_future(
                other.place(asking(f"crowd{i}", knobs, keys=held[i % prefixes], tenant=str(i % tenants)))
            )
            for i in range(30 * prefixes)
        ]
        crowd.append(asyncio.ensure_future(other.place(asking("alone", knobs, tenant="0"))))
        for _ in range(3):  # heartbeats
            await drained(one, other)
            await other.beat()
        await drained(one, other)
        await eventually(lambda: sum(task.done() for task in crowd) >= 2 * prefixes, within_s=3)
        placed = [task.result() for task in crowd if task.done()]
        assert {placement.replica for placement in placed if placement} == {"r1", "r2"}
        for task in crowd:
            task.cancel()


async def test_who_waits_for_full_replicas_hides_nobody(redis_server: RedisServer, client: redis.Redis) -> None:
    knobs = replace(PATIENT, max_active_requests=3)
    async with two_gateways(redis_server, replicas=2) as (one, other):
        held = [chain("the same", f"prefix {i}", *range(40)) for i in range(3)]
        for i, keys in enumerate(held):
            assert await one.place(asking(f"first{i}", knobs, keys=keys, pinned="r0")) is not None
            one.first_token(f"first{i}")
        await drained(one)
        crowd = [await queued(client, other, asking(f"crowd{i}", knobs, keys=held[i % 3])) for i in range(24)]
        async with asyncio.timeout(3):
            placement = await one.place(asking("alone", knobs))
        assert placement is not None
        assert placement.replica == "r1"
        for task in crowd:
            task.cancel()


async def test_refusals_do_not_keep_their_requests_in_memory(redis_server: RedisServer, client: redis.Redis) -> None:
    """Their bodies are not counted any more."""
    async with two_gateways(redis_server) as (one, _):
        await fill(one)
        gc.collect()
        gc.disable()  # it would find them, later
        try:
            for number in range(20):
                try:
                    await one.place(asking(f"refused {number}", replace(ONE_EACH, max_waiting=0)))
                except NoRoom:
                    continue
            kept = sum(type(each) is PlaceRequest for each in gc.get_objects())
        finally:
            gc.enable()
    assert kept < 10
