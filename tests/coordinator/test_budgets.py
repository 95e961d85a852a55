"""A tenant's limits hold over all gateways: requests in flight, and requests and tokens a minute."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from contextlib import nullcontext as nothing
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.errors import OverLimit, StoreLate
from coordinator.keys import PoolKeys
from coordinator.maintenance.repair import Repair
from coordinator.placement import Placement, PlaceRequest, Reservation, Used
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool import seats
from coordinator.pool.pool import Pool
from coordinator.pool.tenant_use import TenantUse, read_use
from coordinator.redis.wire import Wire, load_scripts
from tests.account_limits import limits_of
from tests.coordinator.queueing import asking, queued, two_gateways, waiting
from tests.coordinator.stage import KEYS, beaten, chain, drained, now_ms, standing_still
from tests.polling import eventually
from tests.redis_server import RedisServer

MINUTE_MS = 60_000
PLENTY = PolicyKnobs()


def limited(name: str, tenant: str = "t", *, knobs: PolicyKnobs = PLENTY, **limits: int) -> PlaceRequest:
    """A request of a tenant with these limits, for which all replicas have room."""
    asked = asking(name, knobs, tenant=tenant, keys=chain(name))
    asked.limits = limits_of(tenant, **limits)
    return asked


async def use_of(pool: Pool, tenant: str = "t") -> TenantUse:
    return (await read_use([pool], [tenant]))[tenant]


async def active(client: redis.Redis, tenant: str = "t") -> int:
    return int(await client.hget(KEYS.tenants, f"active {tenant}") or 0)


async def placed(pool: Pool, asked: PlaceRequest) -> Placement:
    placement = await pool.place(asked)
    assert placement is not None
    return placement


async def test_requests_of_one_tenant_wait_in_their_order_and_those_of_others_pass(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        knobs = PolicyKnobs(max_active_requests=2)
        for number in range(5):
            await placed(one, asking(f"busy{number}", knobs))
        await placed(one, limited("first", knobs=knobs, concurrency=1))
        order: list[str] = []
        tasks = []
        for name, asked in [
            ("second", limited("second", knobs=knobs, concurrency=1)),
            ("third", limited("third", knobs=knobs, concurrency=1)),
            ("other", asking("other", knobs, tenant="u")),
        ]:
            task = await queued(client, other, asked)
            task.add_done_callback(lambda _, name=name: order.append(name))
            tasks.append(task)
        one.done("busy0")
        await eventually(lambda: order == ["other"])
        one.done("first")
        await eventually(lambda: order == ["other", "second"])
        last = await queued(client, one, asking("last", knobs, tenant="u"))
        one.done("busy1")  # the tenant whose turn it is may not use this room
        assert await last is not None
        one.done("busy2")
        await drained(one, other)
        await beaten(other)
        assert order == ["other", "second"]
        other.done("second")
        await asyncio.gather(*tasks)
        assert order == ["other", "second", "third"]


@pytest.mark.parametrize("starve_ms", [1, 60_000])
async def test_however_many_tenants_are_at_their_limits_others_get_the_room(
    redis_server: RedisServer, client: redis.Redis, starve_ms: int
) -> None:
    tenants, knobs = [f"t{number}" for number in range(17)], PolicyKnobs(max_active_requests=18)

    def of(tenant: str, name: str, **limits: int) -> PlaceRequest:
        asked = asking(f"{tenant}-{name}", knobs, tenant=tenant, band=1, starve_ms=starve_ms, keys=chain(tenant, name))
        asked.limits = limits_of(tenant, **limits)
        return asked

    async with two_gateways(redis_server, 1) as (one, other):
        for tenant in tenants:
            await placed(one, of(tenant, "runs", concurrency=1))
        await placed(one, of("free", "runs"))
        parked = [await queued(client, other, of(tenant, "waits", concurrency=1)) for tenant in tenants]
        urgent = await queued(client, other, asking("urgent", knobs, tenant="free", band=0))
        later = await queued(client, other, asking("later", knobs, tenant="free", band=2))
        one.done("free-runs")
        assert await urgent is not None
        other.done("urgent")
        one.done("t0-runs")  # that of a tenant with limits: room may have come anywhere
        assert await parked[0] is not None
        assert await later is not None
        for each in parked[1:]:
            each.cancel()
        await asyncio.wait(parked[1:])


async def test_a_tenant_that_waits_for_its_own_requests_does_not_make_others_expect_a_long_wait(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server, 1) as (one, other):
        knobs = PolicyKnobs(max_active_requests=2)
        await placed(one, limited("slow0", knobs=knobs, concurrency=1))
        slow = [
            await queued(client, other, limited(f"slow{each}", knobs=knobs, concurrency=1)) for each in range(1, 12)
        ]
        [queue] = [line.split(" ")[1] for line in await client.hkeys(KEYS.waiting)]
        one.done("slow0")
        for number, each in enumerate(slow[:-1], start=1):
            await each
            for quick in range(3):
                await placed(one, asking(f"quick{number}-{quick}", knobs, tenant="u"))
                one.done(f"quick{number}-{quick}")
            await asyncio.sleep(0.05)
            other.done(f"slow{number}")
        await slow[-1]
        expected = await queued_for(client, queue)
        assert expected < 25, "of four that got room in 50 ms"


async def queued_for(client: redis.Redis, queue: str) -> float:
    """The mean time between two that get room, in ms."""
    return float((await client.hget(KEYS.paces, queue) or "0 0 0").split(" ")[1])


async def test_a_slot_that_another_pool_frees_is_used(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        await client.hset(PoolKeys("elsewhere").leases, "tick", await now_ms(client))
        await client.hset(KEYS.tenants, mapping={"active t": 2, "active t elsewhere": 2})
        late = await queued(client, one, limited("late", concurrency=2))
        await client.hset(KEYS.tenants, mapping={"active t": 1, "active t elsewhere": 1})
        await beaten(other)
        assert await late is not None


async def test_what_a_pool_has_in_flight_that_nobody_serves_any_more_is_not_counted(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        await client.hset(KEYS.tenants, mapping={"active t": 2, "active t gone": 1, "active t elsewhere": 1})
        await client.hset(PoolKeys("gone").leases, "tick", await now_ms(client) - 400_000)
        await client.hset(PoolKeys("elsewhere").leases, "tick", await now_ms(client))
        await Repair(one).repair_all()
        assert await client.hgetall(KEYS.tenants) == {"active t": "1", "active t elsewhere": "1"}


async def test_a_retry_keeps_its_slot_and_pays_once(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, _):
        limits = {"concurrency": 1, "requests_per_min": 10, "tokens_per_min": 100_000, "output_tokens": 50}
        first = await placed(one, limited("first", **limits))
        again = limited("again", **limits)
        again.release, again.tried = "first", (first.replica,)
        second = await placed(one, again)
        assert second.replica != first.replica
        assert second.left[0].requests == first.left[0].requests == 9
        assert abs(second.left[0].tokens - first.left[0].tokens) < 100
        assert await active(client) == 1
        assert await client.hkeys(KEYS.budgets("gw0")) == ["again"]
        one.done("again", Used(0, 0))
        await drained(one)
        assert await active(client) == 0


async def test_a_retry_that_finds_no_replica_gives_everything_back(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server, replicas=1) as (one, _):
        first = await placed(one, limited("first", concurrency=1))
        again = limited("again", concurrency=1)
        again.release, again.tried = "first", (first.replica,)
        assert await one.place(again) is None
        await drained(one)
        assert await client.exists(KEYS.budgets("gw0"), KEYS.tenants) == 0


async def test_requests_a_minute_are_a_leaky_bucket_for_all_gateways(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        left = []
        for number in range(3):
            placement = await placed((one, other)[number % 2], limited(f"r{number}", requests_per_min=3))
            left.append(placement.left[0].requests)
        assert left == [2, 1, 0]
        with pytest.raises(OverLimit) as refused:
            await other.place(limited("r3", requests_per_min=3))
        assert refused.value.limit == "requests"
        assert 19 < refused.value.wait_s <= 20
        assert refused.value.left[0].requests == 0
        assert 59_000 < refused.value.left[0].requests_ms <= MINUTE_MS
        await later(client, "requests", refused.value.wait_s)
        assert (await placed(one, limited("r4", requests_per_min=3))).left[0].requests == 0
        with pytest.raises(OverLimit):
            await one.place(limited("r5", requests_per_min=3))


async def later(client: redis.Redis, kind: str, seconds: float) -> None:
    """As if so much time had gone by."""
    text = await client.hget(KEYS.tenants, f"{kind} t")
    at_ms, written = float(text[:-13]), text[-13:]
    await client.hset(KEYS.tenants, f"{kind} t", f"{at_ms - 1000 * seconds:.3f}{written}")


async def test_tokens_a_minute_are_reserved_and_then_corrected_once(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        limits = {"tokens_per_min": 6000, "output_tokens": 500}
        placement = await placed(one, limited("a", **limits))
        reserved = placement.backlog_tokens + 500
        assert placement.left[0].tokens == 6000 - reserved
        one.done("a", Used(9, 100))
        await drained(one)
        one.reservations.forget("a")  # settled twice
        await drained(one)
        after = (await placed(other, limited("b", **limits))).left[0].tokens
        assert abs(after - (6000 - 100 - reserved)) < 30, "what leaked meanwhile"


async def test_no_more_is_left_than_the_limit_allows(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        limits = {"requests_per_min": 1, "tokens_per_min": 200_000}
        await placed(one, limited("used", **limits))
        one.done("used", Used(0, 0))
        await drained(one)
        with pytest.raises(OverLimit) as refused:
            await other.place(limited("next", **limits))
        assert refused.value.left[0].tokens == 200_000


async def test_a_huge_estimate_gives_back_no_more_than_it_took(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, _):
        limits = {"tokens_per_min": 6000}
        await placed(one, limited("used", output_tokens=4000, **limits))
        one.done("used", Used(4000, 4000))
        await placed(one, limited("huge", output_tokens=10_000_000, **limits))
        one.done("huge", Used(0, 0))
        await drained(one)
        left = (await placed(one, limited("next", output_tokens=0, **limits))).left[0].tokens
        assert 1500 < left < 2100


async def test_a_request_that_its_gateway_placed_meanwhile_keeps_its_part_of_the_limits(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "_AWAY_S", 0.0)
    async with two_gateways(redis_server) as (one, other):
        limits = {"concurrency": 1, "tokens_per_min": 6000, "output_tokens": 500}
        await placed(one, limited("first", **limits))
        task = await queued(client, other, limited("taken", **limits))
        wire, away = other.link.wire, asyncio.Event()
        other.seats.on_away = away.set
        other.detach()
        await away.wait()
        [asked] = other.seats.requests()
        reservation = Reservation("taken", "r0", "life1", 100, "-", asked.budget(100))
        other.adopt(reservation)
        other.seats.take(reservation)
        await task
        assert wire is not None
        other.attach(wire)
        await drained(other)
        assert await active(client) == 2
        for pool, name in ((one, "first"), (other, "taken")):
            pool.done(name, Used(0, 0))
        await beaten(other)  # which settles what was placed without the store
        await drained(one, other)
        assert await active(client) == 0


async def test_a_request_that_was_let_in_is_not_refused_when_it_is_placed_again(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        await placed(one, limited("first", requests_per_min=1))
        again = limited("again", requests_per_min=1)
        with pytest.raises(OverLimit):
            await one.place(again)
        again.waited_s = 2.0
        await placed(one, again)


async def test_a_request_that_is_counted_already_is_let_in_and_counts_no_second_time(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        limits = {"requests_per_min": 1, "tokens_per_min": 6000, "output_tokens": 6000}
        await placed(one, limited("first", **limits))
        filled = await client.hget(KEYS.tenants, "requests t")
        again = limited("again", **limits)
        again.is_counted = True
        await placed(one, again)
        assert await client.hget(KEYS.tenants, "requests t") == filled


async def test_the_last_request_may_overfill_the_bucket_and_the_next_one_waits_for_that(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        big = await placed(one, limited("big", tokens_per_min=1000, output_tokens=3000))
        assert big.left[0].tokens == 0
        with pytest.raises(OverLimit) as refused:
            await other.place(limited("next", tokens_per_min=1000))
        assert refused.value.limit == "tokens"
        over = big.backlog_tokens + 3000 - 1000
        assert abs(refused.value.wait_s - over * 60 / 1000) < 1
        await later(client, "tokens", refused.value.wait_s)
        await placed(other, limited("next", tokens_per_min=1000))


async def test_what_one_answer_adds_is_owed_however_long_that_takes(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        await placed(one, limited("big", tokens_per_min=100, output_tokens=3000))
        one.done("big", Used(0, 5000))
        await drained(one)
        for _ in range(2):
            with pytest.raises(OverLimit) as refused:
                await other.place(limited("next", tokens_per_min=100))
            assert abs(refused.value.wait_s - 4900 * 60 / 100) < 5
        await later(client, "tokens", refused.value.wait_s)
        await placed(other, limited("next", tokens_per_min=100))


@pytest.mark.parametrize(
    "how",
    ["not sent", "undone first", "undone after its end", "counted first", "stated first", "over and stated", "lost"],
)
async def test_what_a_gateway_let_in_by_itself_counts_once_whatever_became_of_its_placement(
    redis_server: RedisServer, client: redis.Redis, how: str
) -> None:
    """One request and 1000 tokens, of which it takes 300."""
    limits = {"requests_per_min": 10, "tokens_per_min": 60_000, "output_tokens": 900}
    async with AsyncExitStack() as closing, two_gateways(redis_server) as (one, other):
        await placed(one, asking("warm up", PLENTY))
        asked, wire = limited("late", **limits), one.link.wire
        assert wire is not None
        with nothing() if how == "not sent" else standing_still(redis_server):
            if how != "not sent":
                one.placer.budget_s = 0.05
                one.clock.forget()
                with pytest.raises(StoreLate):
                    await one.place(asked)
                one.placer.budget_s = 5.0
            if how != "undone first":
                one.adopt(Reservation("late", "r1", "life1", 100, "-", asked.budget(100, requests=1)))
            if how in ("undone after its end", "over and stated", "lost"):
                one.done("late", Used(0, 300))
            if "stated" in how:
                one.reassert()
            if how == "counted first":
                one.reservations.count_adopted()
            if how == "lost":
                one.detach()
                await wire.close("lost")
        if how == "undone first":
            await drained(one)
            one.adopt(Reservation("late", "r1", "life1", 100, "-", asked.budget(100, requests=1)))
        if how == "lost":
            await eventually(lambda: is_known(client, "late"))
            wire = await Wire.open(redis_server.url, 5.0, lambda _: None)
            closing.push_async_callback(wire.close)
            await load_scripts(wire)
            one.attach(wire)
        await drained(one)
        one.done("late", Used(0, 300))
        one.reservations.count_adopted()
        await drained(one)
        assert await client.hgetall(KEYS.budgets("gw0")) == {}
        left = (await placed(other, limited("next", **limits))).left
        assert left[0].requests == 10 - 2
        assert abs(left[0].tokens - (60_000 - 300 - 900)) < 1000


async def is_known(client: redis.Redis, reservation: str) -> bool:
    return bool(await client.hexists(KEYS.budgets("gw0"), reservation))


async def test_what_was_used_while_the_store_was_away_counts_when_it_is_back(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """Of requests that the store had placed, and of those that it never heard of."""
    limits = {"requests_per_min": 10, "tokens_per_min": 6000, "output_tokens": 3000}
    async with two_gateways(redis_server) as (one, other):
        asked, wire = limited("first", **limits), one.link.wire
        assert wire is not None
        await placed(one, asked)
        one.detach()
        one.done("first", Used(0, 500))
        for number in range(3):
            one.adopt(Reservation(f"local{number}", "r0", "life1", 9, "-", asked.budget(9, requests=1)))
            one.done(f"local{number}", Used(0, 700))
        one.attach(wire)
        await drained(one)
        left = (await placed(other, limited("next", **limits | {"output_tokens": 0}))).left
        assert left[0].requests == 10 - 5
        assert abs(left[0].tokens - (6000 - 500 - 3 * 700)) < 700


async def test_a_request_that_leaves_the_queue_gives_its_tokens_back(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        limits = {"concurrency": 1, "tokens_per_min": 6000, "output_tokens": 500}
        before = (await placed(one, limited("first", **limits))).left[0].tokens
        gone = await queued(client, other, limited("gone", **limits))
        gone.cancel()
        await asyncio.wait([gone])
        await drained(other)
        one.done("first", Used(0, 0))
        await drained(one)
        assert await client.exists(KEYS.budgets("gw1")) == 0
        assert (await placed(other, limited("next", **limits))).left[0].tokens >= before


async def test_a_dead_gateway_gives_slots_back_and_one_that_comes_back_is_counted_again(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        limits = {"concurrency": 1, "tokens_per_min": 100_000}
        await placed(one, limited("lost", **limits))
        late = await queued(client, other, limited("late", **limits))
        await client.hset(KEYS.gateways, "gw0", "1 1")
        await eventually(lambda: reaped(other, late))
        assert await late is not None
        assert await client.hvals(KEYS.budgets("gw0")) == ["t 100 100000 0"]
        assert await client.ttl(KEYS.budgets("gw0")) > 0
        await one.beat()  # it was only paused
        await drained(one)
        assert await active(client) == 2
        one.done("lost", Used(0, 40))
        await drained(one)
        assert await active(client) == 1
        left = (await placed(one, limited("next", tokens_per_min=100_000))).left[0].tokens
        assert abs(left - (100_000 - 40 - 2 * 100)) < 300


async def reaped(pool: Pool, granted: asyncio.Task[Any]) -> bool:
    await beaten(pool)
    return granted.done()


async def test_an_emptied_store_is_told_what_is_in_flight(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        await placed(one, limited("a", concurrency=2, tokens_per_min=6000, output_tokens=900))
        await client.flushdb()
        one.reassert()
        other.reassert()
        late = limited("b", concurrency=2, tokens_per_min=6000, output_tokens=900)
        one.adopt(Reservation("b", "r0", "life1", 100, "-", late.budget(100)))
        await beaten(one)
        assert await active(client) == 2
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await other.place(limited("c", concurrency=2))
        assert sorted(await client.hvals(KEYS.budgets("gw0"))) == ["t 1000 6000 1", "t 1000 6000 1"]
        one.done("a")
        one.done("b")
        await beaten(one)
        await drained(one)
        assert await active(client) == 0


@pytest.mark.parametrize(
    ("field", "value", "meanwhile"),
    [
        ("active t", "many", nothing()),
        ("active t", "7", pytest.raises(TimeoutError)),
        ("active t m", "-3", nothing()),
        ("requests t", "soon", nothing()),
        ("tokens t", "9" * 15, nothing()),
    ],
)
async def test_what_somebody_wrote_into_the_limits_is_counted_again(
    redis_server: RedisServer, client: redis.Redis, field: str, value: str, meanwhile: Any
) -> None:
    async with two_gateways(redis_server) as (one, other):
        limits = {"concurrency": 2, "requests_per_min": 100, "tokens_per_min": 100_000}
        await placed(one, limited("a", **limits))
        await client.hset(KEYS.tenants, field, value)
        with meanwhile:
            async with asyncio.timeout(0.2):
                await other.place(limited("b", **limits))
        await Repair(one).repair_all()
        assert await active(client) == len(one.live) + len(other.live)
        one.done("a")
        other.done("b")
        await drained(one, other)
        assert await active(client) == 0


async def test_whatever_happens_the_counts_are_those_of_what_is_in_flight(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    dice = random.Random(4)
    async with two_gateways(redis_server) as (one, other):
        tasks: dict[str, tuple[Pool, asyncio.Task[Any]]] = {}
        for number in range(150):
            pool, tenant = dice.choice((one, other)), dice.choice(("t", "u"))
            if len(tasks) < 12 and dice.random() < 0.6:
                name = f"n{number}"
                knobs = PolicyKnobs(max_active_requests=2)
                task = asyncio.get_running_loop().create_task(
                    pool.place(limited(name, tenant, knobs=knobs, concurrency=2))
                )
                tasks[name] = pool, task
            elif tasks:
                name = dice.choice(list(tasks))
                pool, task = tasks.pop(name)
                if not task.done():
                    task.cancel()
                    await asyncio.wait([task])
                pool.done(name)
            await drained(one, other)
            for each in ("t", "u"):
                assert await active(client, each) <= 2
        for name, (pool, task) in tasks.items():
            if not task.done():
                task.cancel()
            pool.done(name)
        await drained(one, other)
        await eventually(lambda: not one.live and not other.live)
        await drained(one, other)
        assert await waiting(client) == 0
        assert await client.exists(KEYS.budgets("gw0"), KEYS.budgets("gw1")) == 0
        assert await active(client) == await active(client, "u") == 0


async def test_two_pools_of_one_redis_share_a_tenants_limit_and_those_of_a_cluster_do_not() -> None:
    assert PoolKeys("a").tenants == PoolKeys("b").tenants == "kvgate:tenants"
    assert PoolKeys("a", "team").tenants == "kvgate:team:tenants"
    assert PoolKeys("a", is_in_cluster=True).tenants == "kvgate:{a}:tenants"


async def test_what_tenants_use_of_their_limits_is_told_whatever_is_in_the_store(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        for number, pool in enumerate([one, other]):
            limits = {"concurrency": 9, "requests_per_min": 10, "tokens_per_min": 1000}
            await placed(pool, limited(f"used{number}", "a tenant", **limits))
        use = await use_of(other, "a tenant")
        assert use.active_requests == 2
        assert (use.used(use.requests_ms, 10), use.used(use.requests_ms, None)) == (2, None)
        assert 0 < (use.used(use.tokens_ms, 1000) or 0) <= 1000
        for garbage in ("nan", "inf", "-5", "9" * 500, "x"):
            await client.hset(KEYS.tenants, mapping={"active t": garbage, "requests t": garbage, "tokens t": garbage})
            use = await use_of(one)
            assert (use.active_requests, use.used(use.tokens_ms, 1000)) == (0, 0)
        assert await read_use([], ["t"]) == {}
