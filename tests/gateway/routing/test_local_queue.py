"""Requests that find no room in their gateway's share wait there, and go in their order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.accounts import AccountLimits, Left, Limits
from coordinator.errors import NoRoom, OverBudget, OverLimit
from coordinator.placement import NOTHING, Placement, PlaceRequest, Reservation, Seat, Standing, Used
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.pool.seats import RESTATED_S
from coordinator.registry import ReplicaRecord, surveyed_state
from coordinator.spending import FREE, AccountBudget, Bill, Spent
from coordinator.store import Store, StoreOptions
from coordinator.subset import Subset
from gateway.routing import local_limits, local_queue
from gateway.routing.local_queue import LocalQueue
from tests.account_limits import limits_of
from tests.coordinator.stage import request
from tests.polling import eventually

REPLICAS = ("r0", "r1", "r2")
ONE_EACH = PolicyKnobs(max_active_requests=2)
"""For two gateways, that is one each."""


class Alone:
    """One of two gateways whose store is away."""

    def __init__(self) -> None:
        self.store = Store(StoreOptions("redis://127.0.0.1:1", 0.02), "g0")
        self.pool: Pool = self.store.pool("m")
        for name in REPLICAS:
            self.pool.records[name] = ReplicaRecord(name, "1", "ready", 0, 0, f"http://{name}")
        self.pool.state = replace(surveyed_state(0, [], [], [], []), gateways=2)
        self.suspects: set[str] = set()
        self.queue = LocalQueue(self.store, self.suspects.__contains__)
        self.queue.watch(self.pool)

    def asked(self, name: str, share: float = 1.0, limits: Limits | None = None, **changes: Any) -> PlaceRequest:
        """A request. `changes` may be those of its standing."""
        standing = {each: changes.pop(each) for each in list(changes) if each in Standing._fields}
        changes = {"knobs": ONE_EACH, "serving": Subset.of(REPLICAS), **changes}
        asked = request(name, (), **changes)
        asked.room_share, asked.standing, asked.limits = share, Standing(**standing), limits
        return asked

    async def place(self, asked: PlaceRequest, is_retry: bool = False) -> str:
        placed = await self.queue.place(self.pool, asked, is_retry)
        return placed.replica if isinstance(placed, Reservation) else placed

    async def waits(self, asked: PlaceRequest) -> asyncio.Task[str]:
        task = asyncio.get_running_loop().create_task(self.place(asked))
        await asyncio.sleep(0)
        assert not task.done()
        return task

    async def fill(self) -> None:
        assert {await self.place(self.asked(f"full{number}")) for number in range(3)} == set(REPLICAS)

    def free(self, replica: str = "r0") -> None:
        self.pool.done(next(one.id for one in self.pool.live.values() if one.replica == replica))


@pytest.fixture
async def alone() -> Alone:
    return Alone()


async def soon(task: Awaitable[str]) -> str:
    return await asyncio.wait_for(task, 1)


async def test_bands_go_in_their_order_and_in_a_band_the_one_that_waits_longest(alone: Alone) -> None:
    await alone.fill()
    order: list[str] = []
    tasks = []
    for name, band in (("batch", 2), ("first", 1), ("second", 1), ("urgent", 0)):
        tasks.append(await alone.waits(alone.asked(name, band=band)))
        tasks[-1].add_done_callback(lambda _, name=name: order.append(name))
    assert alone.pool.waiting == 4
    for count in range(1, 5):
        alone.free()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)
        assert len(order) == count
        tasks = [task for task in tasks if not task.done()]
    assert order == ["urgent", "first", "second", "batch"]
    assert alone.pool.waiting == 0


async def test_a_request_that_waits_for_one_replica_holds_up_nobody_else(alone: Alone) -> None:
    await alone.fill()
    pinned = await alone.waits(alone.asked("pinned", pinned="r1"))
    retry = await alone.waits(alone.asked("retry", tried=("r0",)))
    other = await alone.waits(alone.asked("other"))
    alone.free("r0")
    assert await soon(other) == "r0"
    alone.free("r1")
    assert await soon(pinned) == "r1"
    alone.free("r2")
    assert await soon(retry) == "r2"


async def test_the_end_of_a_prefill_makes_room(alone: Alone) -> None:
    knobs = PolicyKnobs(max_wait_s=0.1, prefill_tokens_per_s=100)
    for number in range(3):
        await alone.place(alone.asked(f"long{number}", knobs=knobs, prompt_tokens=1000))
    task = await alone.waits(alone.asked("short", knobs=knobs))
    alone.pool.first_token("long1")
    assert await soon(task) == alone.pool.live["long1"].replica


async def test_a_prefill_that_nobody_sees_ends_after_its_time(alone: Alone) -> None:
    knobs = PolicyKnobs(max_wait_s=0.1, prefill_tokens_per_s=1000)
    for number in range(3):
        asked = alone.asked(f"long{number}", knobs=knobs, prompt_tokens=100)
        asked.is_streamed = False
        await alone.place(asked)
    assert await soon(await alone.waits(alone.asked("short", knobs=knobs))) in REPLICAS


async def test_room_is_kept_for_a_seat_that_goes_first_and_given_to_it_when_the_store_stays_away(alone: Alone) -> None:
    seat = Seat(0, 0)
    early, later = alone.asked("early", band=1), alone.asked("later", band=2)
    seated = [
        asyncio.get_running_loop().create_task(alone.pool.seats.wait(each, seat, None)) for each in (early, later)
    ]
    await asyncio.sleep(0)
    assert {await alone.place(alone.asked(name, band=band)) for name, band in (("a", 0), ("b", 1))} < set(REPLICAS)
    newcomer = await alone.waits(alone.asked("newcomer", band=1))
    alone.pool.seats.is_away = True
    alone.pool.seats.on_away()
    assert isinstance(await asyncio.wait_for(seated[0], 1), Reservation)
    alone.free(alone.pool.live["a"].replica)
    assert await soon(newcomer) in REPLICAS
    assert not seated[1].done()
    seated[1].cancel()
    await asyncio.wait(seated)
    await alone.pool.seats.close()


async def test_a_client_that_leaves_takes_nothing_whenever_it_leaves(alone: Alone) -> None:
    await alone.fill()
    gone, granted = [await alone.waits(alone.asked(name)) for name in ("gone", "granted")]
    gone.cancel()
    alone.free()
    await asyncio.sleep(0)  # the room is handed out in this turn
    assert "granted" in alone.pool.live
    granted.cancel()
    await asyncio.wait([gone, granted])
    assert alone.pool.load.requests == {"r1": 1, "r2": 1}
    assert alone.pool.waiting == 0
    assert await alone.place(alone.asked("next")) == "r0"


async def test_a_request_waits_for_its_time_at_most_which_began_on_its_seat(alone: Alone) -> None:
    await alone.fill()
    asked = alone.asked("late", wait_ms=30_000)
    asked.waited_s = 29.95
    with pytest.raises(NoRoom) as refused:
        await asyncio.wait_for(alone.place(asked), 1)
    assert refused.value.reason == "waited"
    assert asked.waited_s > 30


async def test_only_this_gateways_share_of_a_tenants_queue_may_wait(alone: Alone) -> None:
    await alone.fill()
    knobs = replace(ONE_EACH, max_waiting_per_tenant=4)
    tasks = [await alone.waits(alone.asked(f"waits{number}", knobs=knobs)) for number in range(2)]
    with pytest.raises(NoRoom) as refused:
        await alone.place(alone.asked("more", knobs=knobs))
    assert refused.value.reason == "full_tenant"
    seated = alone.asked("seated", knobs=knobs)
    seated.waited_s = 1.0
    tasks.append(await alone.waits(seated))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_requests_that_never_wait_and_those_without_a_well_replica_go_at_once(alone: Alone) -> None:
    await alone.fill()
    assert await alone.place(alone.asked("tokenize", share=0.0)) in REPLICAS
    assert await alone.place(alone.asked("none", tried=REPLICAS)) is None
    alone.suspects.update(REPLICAS)
    assert await alone.place(alone.asked("anyway")) in REPLICAS


async def test_a_tenant_waits_for_its_own_requests_and_nobody_waits_for_it(alone: Alone) -> None:
    limits = limits_of("team", concurrency=2)
    assert await alone.place(alone.asked("one", limits=limits, tenant="team")) in REPLICAS
    parked = await alone.waits(alone.asked("two", limits=limits, tenant="team"))
    assert await alone.place(alone.asked("other")) in REPLICAS
    alone.pool.done("one")
    assert await soon(parked) in REPLICAS


async def test_a_key_waits_for_its_own_requests_and_other_keys_of_its_tenant_pass(alone: Alone) -> None:
    team = AccountLimits("team", concurrency=6)
    first, second = (Limits((team, AccountLimits(f"key:{name}", concurrency=2))) for name in "ab")
    assert await alone.place(alone.asked("one", limits=first, tenant="team")) in REPLICAS
    parked = await alone.waits(alone.asked("two", limits=first, tenant="team"))
    assert await alone.place(alone.asked("other", limits=second, tenant="team")) in REPLICAS
    assert not parked.done()
    alone.pool.done("one")
    assert await soon(parked) in REPLICAS


async def test_those_that_the_tenant_has_elsewhere_count_for_a_while(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = limits_of("team", concurrency=3)
    monkeypatch.setattr(local_queue, "TOLD_MS", 50)
    monkeypatch.setattr(local_limits, "TOLD_MS", 50)
    asked = alone.asked("one", limits=limits, tenant="team")
    alone.queue.told(asked, (Left(-1, 0, -1, 0, 3),))
    assert await soon(await alone.waits(asked)) in REPLICAS


async def test_nobody_overtakes_the_tenants_requests_that_wait_in_the_store(alone: Alone) -> None:
    limits = limits_of("team", concurrency=2)
    seat = asyncio.ensure_future(
        alone.pool.seats.wait(alone.asked("seat", limits=limits, tenant="team"), Seat(1, 0), None)
    )
    await asyncio.sleep(0)
    late = await alone.waits(alone.asked("late", limits=limits, tenant="team"))
    assert await alone.place(alone.asked("other", limits=limits_of("u", concurrency=2), tenant="u")) in REPLICAS
    for each in (seat, late):
        each.cancel()
    await asyncio.wait([seat, late])


async def test_a_share_of_a_minute_is_not_filled_again_when_the_store_comes_and_goes(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, knobs = limits_of("team", requests_per_min=2), PolicyKnobs()
    assert await alone.place(alone.asked("one", knobs=knobs, limits=limits, tenant="team")) in REPLICAS
    monkeypatch.setattr(local_queue, "RESTATED_S", 0.0)
    with monkeypatch.context() as up:
        up.setattr(alone.store, "is_up", lambda _pool: True)
        alone.queue._local.add("m")
        alone.queue.store_is_up()
        await eventually(lambda: not alone.queue._local)
    with pytest.raises(OverLimit):
        await alone.place(alone.asked("two", knobs=knobs, limits=limits, tenant="team"))


async def test_a_request_counts_once_for_the_limits_of_a_minute(alone: Alone) -> None:
    limits, knobs = limits_of("team", requests_per_min=4, tokens_per_min=1000, output_tokens=100), PolicyKnobs()

    async def place(name: str, is_retry: bool = False) -> None:
        asked = alone.asked(name, knobs=knobs, limits=limits, tenant="team", prompt_tokens=600)
        assert await alone.place(asked, is_retry) in REPLICAS
        alone.pool.done(name, NOTHING)

    await place("first")
    await place("first again", is_retry=True)
    await place("second")
    with pytest.raises(OverLimit) as refused:
        await place("third")
    assert refused.value.limit == "requests"


async def test_those_that_wait_go_back_to_the_store_in_their_order_once_it_knows_all_load(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    await alone.fill()
    order: list[str] = []
    tasks = []
    for name, band in (("batch", 2), ("first", 1), ("second", 1)):
        tasks.append(await alone.waits(alone.asked(name, band=band)))
        tasks[-1].add_done_callback(lambda _, name=name: order.append(name))
    monkeypatch.setattr(alone.store, "is_up", lambda _pool: True)
    alone.queue.store_is_up()
    await asyncio.sleep(0.1)
    reasserted_s = time.monotonic()
    alone.pool.reassert()
    late = alone.asked("late")
    assert alone.queue.would_overtake(alone.pool, late)
    alone.free("r1")
    assert await soon(tasks[1]) == "r1", "it takes room that appears meanwhile"
    assert await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), 10) == ["again"] * 2
    assert time.monotonic() - reasserted_s >= RESTATED_S
    assert order == ["first", "second", "batch"]
    assert not alone.queue.would_overtake(alone.pool, late)


def spending(limit: int, name: str = "t") -> Bill:
    """Of a request that can take 10 of a budget."""
    budget = AccountBudget(name, "day", "tokens", limit, 0.8, "2026-11-28", 2**31, f"2026-11-28/tokens/{name}")
    return Bill((budget,), FREE, 1, 9)


async def test_each_gateway_spends_its_part_of_what_was_left_when_the_store_told_last() -> None:
    alone, bill = Alone(), spending(100)
    spent = alone.pool.reservations.spent
    spent.told(bill, (Spent("1", 40, 0),))
    for number in range(3):  # of 60, two gateways have 30 each
        assert await alone.place(alone.asked(f"a{number}", share=0, bill=bill)) in REPLICAS
    with pytest.raises(OverBudget) as refused:
        await alone.place(alone.asked("more", share=0, bill=bill))
    assert refused.value.is_local
    assert not refused.value.blocking()[3], "not for the rest of the day"
    alone.pool.done("a0", Used(0, 4))
    with pytest.raises(OverBudget):
        await alone.place(alone.asked("again", share=0, bill=bill))
    alone.pool.done("a1", Used(0, 4))
    assert await alone.place(alone.asked("fits", share=0, bill=bill), is_retry=True) in REPLICAS


async def test_what_others_held_when_the_store_told_last_is_not_let_in_once_more() -> None:
    alone, bill = Alone(), spending(100)
    asked = alone.asked("placed", share=0, bill=bill)
    where = ("r0", "1", "http://r0", "cold", 0, 0, 0, False, 0, 1, "", "", 0, "", False)
    told = Placement(*where, spent=(Spent("1", 0, 80),))
    alone.pool.placer.accept(asked, told)
    with pytest.raises(OverBudget):  # of the 20 that are left, two gateways have 10 each, and one runs here
        await alone.place(alone.asked("more", share=0, bill=bill))
    alone.pool.done("placed", NOTHING)
    assert await alone.place(alone.asked("fits", share=0, bill=bill)) in REPLICAS
    with pytest.raises(OverBudget):
        await alone.place(alone.asked("last", share=0, bill=bill))


@pytest.mark.parametrize(("limit", "fits"), [(1000, 1), (999, 0), (2000, 2)])
async def test_of_a_budget_of_which_it_knows_nothing_a_gateway_spends_one_percent(limit: int, fits: int) -> None:
    alone, bill = Alone(), spending(limit)
    for number in range(fits):
        assert await alone.place(alone.asked(f"a{number}", share=0, bill=bill)) in REPLICAS
    with pytest.raises(OverBudget):
        await alone.place(alone.asked("more", share=0, bill=bill))


async def test_a_request_that_waited_here_is_checked_again_when_it_gets_room() -> None:
    alone, bill = Alone(), spending(2000)
    for number in range(3):
        await alone.place(alone.asked(f"full{number}"))
    waits = await alone.waits(alone.asked("waits", bill=bill))
    for name in ("a", "b"):
        await alone.place(alone.asked(name, share=0, bill=bill))
        alone.pool.done(name, Used(0, 10))
    for number in range(3):
        alone.pool.done(f"full{number}", NOTHING)
    assert await asyncio.wait_for(waits, 5) == "again"
