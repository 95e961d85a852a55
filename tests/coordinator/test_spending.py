"""Budgets hold over all gateways: what accounts spend in a day, a week or a month."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis as blocking_redis
import redis.asyncio as redis

from coordinator.errors import OverBudget, StoreRefused
from coordinator.maintenance.reaper import Reaper
from coordinator.placement import NOTHING, Placement, PlaceRequest, Reservation, Used
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.account_spending import OldBudgets, read_spent
from coordinator.pool.pool import Pool
from coordinator.pool.spent_sums import SpentSums
from coordinator.spending import FREE, AccountBudget, Bill, Price
from tests.account_limits import limits_of
from tests.coordinator.queueing import asking, queued, two_gateways
from tests.coordinator.stage import KEYS, beaten, chain, drained, joined, now_ms, register
from tests.polling import eventually, wait_until
from tests.redis_server import RedisServer

PLENTY = PolicyKnobs()
NAME = "2026-11/money/t"
COST = 60
"""The most that a request can cost: 10 tokens of a prompt at 1 nano, and 25 of an answer at 2."""


def budget(limit: int, unit: Any = "money", window: str = "2026-11", account: str = "t") -> AccountBudget:
    return AccountBudget(account, "month", unit, limit, 0.8, window, 2**31, f"{window}/{unit}/{account}")


def costly(
    name: str, *budgets: AccountBudget, knobs: PolicyKnobs = PLENTY, prompt: int = 10, **changes: Any
) -> PlaceRequest:
    """A request that can cost COST."""
    asked = asking(name, knobs, tenant="t", keys=chain(name), prompt_tokens=prompt, **changes)
    asked.bill = Bill(budgets, Price(10**6, 10**6 // 10, 2 * 10**6), prompt, 25)
    return asked


async def placed(pool: Pool, asked: PlaceRequest) -> Placement:
    placement = await pool.place(asked)
    assert isinstance(placement, Placement)
    return placement


async def spent(client: redis.Redis, name: str = NAME) -> tuple[int, int]:
    """What is settled, and held."""
    settled, held = await client.hmget(KEYS.spending, f"settled {name}", f"held {name}")
    return int(settled or 0), int(held or 0)


async def dies(client: redis.Redis, pool: Pool, witness: Pool, after_s: int) -> None:
    """A gateway, whose requests were placed so many seconds ago, is reaped as soon as its lease has run out."""
    leased = KEYS.leased(pool.gateway)
    for reservation, entry in (await client.hgetall(leased)).items():
        life, placed_ms, rest = entry.split(" ", 2)
        await client.hset(leased, reservation, f"{life} {int(placed_ms) - 1000 * after_s} {rest}")
    await client.hset(KEYS.gateways, pool.gateway, f"{pool.link.epoch} {await now_ms(client) - 1}")
    await Reaper(witness).give_back([pool.gateway])


def took(nanos: int, tokens: int = 0) -> Used:
    return Used(0, tokens, nanos)


async def test_as_many_requests_are_let_in_as_the_budget_has_room_for_whatever_gateway_they_come_to(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        within = budget(10 * COST)
        answers = await asyncio.gather(
            *((one, other)[number % 2].place(costly(f"r{number}", within)) for number in range(64)),
            return_exceptions=True,
        )
        assert sum(isinstance(each, Placement) for each in answers) == 10
        assert sum(isinstance(each, OverBudget) for each in answers) == 54
        assert await spent(client) == (0, 10 * COST)
        with pytest.raises(OverBudget) as refused:
            await one.place(costly("more", within))
        budget_in_the_way, _, most, is_settled = refused.value.blocking()
        assert (budget_in_the_way, most, is_settled) == (within, COST, False), "requests in flight are in the way"
        for number in range(64):
            (one, other)[number % 2].done(f"r{number}", took(COST))
        await drained(one, other)
        assert await spent(client) == (10 * COST, 0)
        with pytest.raises(OverBudget) as refused:
            await other.place(costly("last", within))
        assert refused.value.blocking()[3]


async def test_a_request_settles_what_it_took_once(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, other):
        within = budget(1000), budget(70, "tokens")
        placement = await placed(one, costly("a", *within))
        assert [(each.settled, each.held) for each in placement.spent] == [(0, 0), (0, 0)]
        assert await spent(client, within[1].name) == (0, 35)
        for _ in range(2):
            one.done("a", took(7, 20))
            await drained(one)
        assert await spent(client) == (7, 0)
        assert await spent(client, within[1].name) == (20, 0)
        placement = await placed(other, costly("b", *within))
        assert [(each.settled, each.held) for each in placement.spent] == [(7, 0), (20, 0)]
        with pytest.raises(OverBudget) as refused:
            await one.place(costly("c", *within))
        assert refused.value.blocking()[0].unit == "tokens"


async def test_the_cached_part_of_a_prompt_is_held_at_its_own_price(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with joined(redis_server.url) as one:
        await register(one, 1)
        await placed(one, costly("first", budget(10_000), prompt=1000))
        one.done("first", NOTHING)
        again = costly("again", budget(10_000), prompt=1000)
        again.keys, again.tokens = chain("first"), [400] * len(chain("first"))
        first = costly("first2", budget(10_000), prompt=1000)
        first.keys, first.tokens = again.keys, again.tokens
        await placed(one, first)
        one.done("first2", NOTHING)
        placement = await placed(one, again)
        await drained(one)
        uncached = placement.backlog_tokens
        assert 0 < uncached < 1000
        assert (await spent(client))[1] == uncached + -(-(1000 - uncached) // 10) + 50


async def test_the_next_attempt_holds_its_own_price_and_is_checked_again(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        within = budget(COST)
        await placed(one, costly("first", within))
        await placed(one, costly("second", within, release="first"))
        assert await spent(client) == (0, COST)
        dearer = costly("third", within, release="second")
        assert dearer.bill is not None
        dearer.bill = Bill(dearer.bill.budgets, Price(10**6, 10**5, 20 * 10**6), 10, 25)
        with pytest.raises(OverBudget):
            await one.place(dearer)
        await drained(one)
        assert await spent(client) == (0, 0)


async def test_a_queued_request_holds_nothing_and_is_checked_when_it_gets_room(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server, 1) as (one, other):
        knobs, within = PolicyKnobs(max_active_requests=1), budget(2 * COST)
        await placed(one, costly("runs", within, knobs=knobs))
        asked = costly("waits", within, knobs=knobs)
        asked.limits = limits_of("t", tokens_per_min=1000)
        waits = await queued(client, other, asked)
        assert await spent(client) == (0, COST)
        one.done("runs", took(COST + 1))  # it took more than was thought
        with pytest.raises(OverBudget):
            await waits
        await drained(one, other)
        assert await spent(client) == (COST + 1, 0)
        assert await client.hgetall(KEYS.budgets("gw1")) == {}, "what its seat had reserved of limits"


async def test_a_dead_gateways_requests_hold_what_they_can_have_cost_until_the_gateway_tells(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        within = budget(10**12)
        asked = costly("lost", within)
        assert asked.bill is not None
        asked.bill = Bill((within,), Price(10**6, 10**5, 2 * 10**6), 10, 10**9)
        await placed(one, asked)
        one.first_token("lost")
        await placed(one, costly("over", within))
        one.done("over", took(5))
        await drained(one)
        assert (await spent(client))[1] > 10**9
        await dies(client, one, other, 30)
        settled, held = await spent(client)
        assert held == 0
        assert 15 + 2 * 500 * 27 < settled < 15 + 2 * 500 * 29, "with the tokens of the time that it can have lived"
        assert 3500 < await client.ttl(KEYS.leased("gw0")) <= 3600
        await beaten(one)  # it was not dead, and states what it has
        await drained(one)
        settled, held = await spent(client)
        assert (settled, held > 10**9) == (5, True)
        assert await client.ttl(KEYS.leased("gw0")) == -1
        one.done("lost", took(9))
        await drained(one)
        assert await spent(client) == (14, 0)


async def test_a_dead_gateways_request_without_a_first_token_costs_nothing_until_the_gateway_tells(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        within = budget(1000)
        for name in ("begins", "waits"):
            await placed(one, costly(name, within))
        one.first_token("begins")
        await drained(one)
        await dies(client, one, other, 30)
        assert await spent(client) == (COST, 0)
        await beaten(one)  # it was not dead
        await drained(one)
        assert await spent(client) == (0, 2 * COST)
        one.done("waits", took(7))
        await drained(one)
        assert await spent(client) == (7, COST)


@pytest.mark.usefixtures("client")  # which removes the keys
@pytest.mark.parametrize("is_adopted", [False, True])
async def test_the_store_hears_of_a_first_token_before_its_client(redis_server: RedisServer, is_adopted: bool) -> None:
    """Otherwise a gateway that dies then would have served its client for nothing."""
    async with two_gateways(redis_server) as (one, _):
        asked = costly("a", budget(1000))
        if is_adopted:
            one.adopt(Reservation("a", "r0", "life1", 10, "-", bill=asked.bill, uncached_tokens=10))
            one.reservations.count_adopted()
        else:
            await placed(one, asked)
        await drained(one)
        with blocking_redis.Redis.from_url(redis_server.url, decode_responses=True) as other:
            entry = other.hget(KEYS.flight("gw0"), "a")
            one.first_token("a")
            wait_until(lambda: other.hget(KEYS.flight("gw0"), "a") == entry.replace(" 10 ", " 0 "))


async def test_an_emptied_store_is_raised_to_what_gateways_have_seen(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        within = budget(1000)
        for number, pool in enumerate((one, other, one)):
            await placed(pool, costly(f"r{number}", within))
            pool.done(f"r{number}", took(10 + number))
            await drained(pool)
        await placed(other, costly("in-flight", within))
        assert await spent(client) == (33, COST)
        await client.flushdb()
        await asyncio.gather(beaten(one), beaten(other))
        await drained(one, other)
        assert await spent(client) == (33, COST)
        other.done("in-flight", took(1))
        await drained(other)
        assert await spent(client) == (34, 0)


@pytest.mark.parametrize("keys", [["spending"], ["spending", "spent"], ["spent"], ["leased"], ["spent", "leased"]])
async def test_any_of_its_keys_may_be_deleted(redis_server: RedisServer, client: redis.Redis, keys: list[str]) -> None:
    async with two_gateways(redis_server) as (one, other):
        within = budget(1000)
        for number in range(4):
            await placed((one, other)[number % 2], costly(f"r{number}", within))
            (one, other)[number % 2].done(f"r{number}", took(10))
            await drained(one, other)
        await placed(one, costly("a", within))
        await placed(other, costly("b", within))
        found = [key for key in await client.keys("*") if key.split(":")[-1] in keys or key.split(":")[-2] in keys]
        assert await client.delete(*found) == len(found) > 0
        one.done("a", took(10))
        await drained(one)
        other.done("b", took(10))
        await drained(one, other)
        settled, held = await spent(client)
        assert settled == 60
        assert held == (0 if "leased" not in keys else 2 * COST)


async def test_what_was_held_of_a_hash_that_is_lost_is_stated_again_and_frees_nothing_of_the_next_one(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        within = budget(1000)
        for name in ("over", "runs"):
            await placed(one, costly(name, within))
        await placed(other, costly("before", within))
        other.done("before", took(1))
        await drained(other)
        one.done("over", took(1))
        await drained(one)
        await placed(one, costly("ends", within))
        await client.delete(KEYS.spending)
        await placed(other, costly("new", within))
        one.done("ends", took(1))
        await drained(one)
        assert await spent(client) == (3, 2 * COST)


async def test_a_store_that_lost_its_last_writes_gets_them_again(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """As a replica that takes over."""
    async with two_gateways(redis_server) as (one, other):
        within = budget(1000)
        saved: dict[str, dict[str, str]] = {}
        for number in range(6):
            if number == 2:
                spending = [key for key in await client.keys("*") if "spen" in key]
                saved = {key: await client.hgetall(key) for key in spending}
            pool = (one, other)[number % 2]
            await placed(pool, costly(f"r{number}", within))
            pool.done(f"r{number}", took(10))
            await drained(pool)
        for key, fields in saved.items():
            await client.delete(key)
            await client.hset(key, mapping=fields)
        one.reassert()
        other.reassert()
        await drained(one, other)
        assert await spent(client) == (60, 0)


async def test_what_is_spent_while_the_store_is_away_is_told_when_it_is_back(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        within = budget(1000)
        await placed(one, costly("before", within))
        wire = one.link.wire
        assert wire is not None
        one.detach()
        one.done("before", took(7))
        one.attach(wire)
        await drained(one)
        assert await spent(client) == (7, 0)


async def test_garbage_in_its_hash_is_replaced_by_what_gateways_know(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        within = budget(1000)
        for number in range(2):
            await placed(one, costly(f"r{number}", within))
            one.done(f"r{number}", took(10))
            await drained(one)
        garbage: list[dict[str, Any]] = [{f"settled {NAME}": "x", f"held {NAME}": "-5"}, {"life": "x y"}]
        for number, fields in enumerate(garbage):
            await client.hset(KEYS.spending, mapping=fields)
            await placed(one, costly(f"next{number}", within))
            one.done(f"next{number}", took(10))
            await drained(one)
            assert await spent(client) == (30 + 10 * number, 0)
        await client.delete(KEYS.spending)
        await client.set(KEYS.spending, "no hash")
        await placed(one, costly("last", within))
        one.done("last", took(10))
        await drained(one)
        assert await spent(client) == (50, 0)


async def test_requests_without_budgets_write_nothing_of_them(redis_server: RedisServer, client: redis.Redis) -> None:
    async with two_gateways(redis_server) as (one, _):
        await placed(one, asking("free", PLENTY))
        one.done("free", took(5))
        await drained(one)
        assert [key for key in await client.keys("*") if "spen" in key or "leased" in key] == []


async def test_windows_that_are_long_over_are_removed_and_others_stay(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with joined(redis_server.url) as one:
        now = await now_ms(client)
        today = datetime.fromtimestamp(now / 1000, UTC).date()
        young, old = today - timedelta(days=8), today - timedelta(days=11)
        kept = ["life", f"settled {young}/money/t", f"held {today:%Y-%m}/tokens/t", "settled 2999-W53/money/t", "other"]
        gone = [f"settled {old}/money/t", f"base {old}/money/t", "held 2020-02/tokens/t", "settled 2020-W53/money/t"]
        await client.hset(KEYS.spending, mapping=dict.fromkeys([*kept, *gone], 1))
        await OldBudgets(one).remove()
        assert sorted(await client.hkeys(KEYS.spending)) == sorted(kept)


async def test_what_is_spent_is_read_as_0_where_nobody_has_spent(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with joined(redis_server.url) as one:
        await register(one, 1)
        await placed(one, costly("a", budget(1000)))
        told = await read_spent([one], [budget(1000), budget(1000, "tokens")])
        assert [(each.settled, each.held) for each in told] == [(0, COST), (0, 0)]
        await client.set(KEYS.spending, "no hash")
        with pytest.raises(StoreRefused):
            await read_spent([one], [budget(1000)])


@pytest.mark.parametrize(
    ("unit", "is_free", "is_let_in"), [("money", False, False), ("tokens", True, False), ("money", True, True)]
)
async def test_a_prompt_that_nobody_reads_is_refused_when_the_budget_is_used_up_unless_it_is_free(
    redis_server: RedisServer, client: redis.Redis, unit: Any, is_free: bool, is_let_in: bool
) -> None:
    async with two_gateways(redis_server) as (one, _):
        within = budget(100, unit)
        asked = [costly(name, within, prompt=0) for name in ("first", "next")]
        for each in asked:
            each.bill = Bill((within,), FREE if is_free else Price(10**6, 10**5, 10**6), 0, 0)
        await placed(one, asked[0])
        await drained(one)
        assert (await spent(client, within.name))[1] == (0 if is_let_in else 1)
        one.done("first", took(100, 100))
        await drained(one)
        if is_let_in:
            await placed(one, asked[1])
        else:
            with pytest.raises(OverBudget) as refused:
                await one.place(asked[1])
            assert refused.value.blocking()[3]


async def test_a_gateway_knows_from_a_refusal_what_is_spent(redis_server: RedisServer) -> None:
    async with two_gateways(redis_server) as (one, other):
        within = budget(COST)
        await placed(one, costly("all", within))
        one.done("all", took(COST))
        await drained(one)
        assert other.reservations.spent.seen(within) is None
        with pytest.raises(OverBudget):
            await other.place(costly("more", within))
        assert other.reservations.spent.seen(within) == COST


async def test_a_deleted_hash_is_raised_when_the_next_request_is_placed(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """Not only when one ends: a budget that is used up would be open until then."""
    async with two_gateways(redis_server) as (one, _):
        within = budget(1000)
        await placed(one, costly("before", within))
        one.done("before", took(900))
        await drained(one)
        await client.delete(KEYS.spending)
        await placed(one, costly("next", within))
        await drained(one)
        assert await spent(client) == (900, COST)
        with pytest.raises(OverBudget):
            await one.place(costly("more", within))


async def test_what_a_dead_gateway_holds_on_a_replica_that_is_gone_is_freed_too(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        asked = costly("a", budget(1000))
        adopted = Reservation("a", "r0", "a life before", 10, "-", bill=asked.bill, placed_ms=await now_ms(client))
        adopted.uncached_tokens = 10
        one.adopt(adopted)
        one.reservations.count_adopted()
        await drained(one)
        assert await spent(client) == (0, COST)
        assert await client.exists(KEYS.flight("gw0")) == 0
        await client.hset(KEYS.gateways, "gw0", f"{one.link.epoch} 1")
        await Reaper(other).give_back(["gw0"])
        settled, held = await spent(client)
        assert held == 0
        assert settled <= COST
        assert 3500 < await client.ttl(KEYS.leased("gw0")) <= 3600


async def test_a_request_that_was_placed_without_the_store_is_told_soon(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """Not only with the next heartbeat: meanwhile the store is there, and lets others in."""
    async with two_gateways(redis_server) as (one, _):
        one.adopt(Reservation("a", "r0", "life1", 10, "-", bill=costly("a", budget(1000)).bill, uncached_tokens=10))

        async def is_held() -> bool:
            return await spent(client) == (0, COST)

        await eventually(is_held)


def test_a_call_tells_some_hundred_sums_and_the_next_one_the_rest() -> None:
    """Redis' Lua cannot take any number of values at once."""
    sums, told = SpentSums(), []
    for number in range(1100):
        sums.settle(Bill((budget(9, account=f"t{number}"),), FREE, 0, 0), took(1))
    while sums._new:
        told.append(sums.take()[0].count(" / "))
    assert told == [500, 500, 100]


async def test_windows_of_many_accounts_are_removed_some_at_a_time(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with joined(redis_server.url) as one:
        await client.hset(KEYS.spending, mapping={f"settled 2020-02-02/money/t{number}": 1 for number in range(1100)})
        left = list[int]()
        for _ in range(3):
            await OldBudgets(one).remove()
            left.append(await client.hlen(KEYS.spending))
        assert left == [600, 100, 0]


async def test_a_request_that_was_placed_without_the_store_costs_no_more_than_its_time_if_its_gateway_dies(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        bill = Bill((budget(10**12),), Price(10**6, 10**5, 2 * 10**6), 10, 10**9)
        one.adopt(Reservation("a", "r0", "life1", 10, "-", bill=bill, uncached_tokens=10))
        one.first_token("a")
        one.reservations.count_adopted()
        await drained(one)
        await dies(client, one, other, 30)
        settled, held = await spent(client)
        assert held == 0
        assert 10 + 2 * 500 * 27 < settled < 10 + 2 * 500 * 29


async def test_what_a_gateway_that_was_paused_had_not_spent_is_not_counted_when_the_store_is_emptied(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        for name in ("a", "b"):
            await placed(one, costly(name, budget(10_000)))
        await client.hset(KEYS.gateways, "gw0", f"{one.link.epoch} 1")
        await Reaper(other).give_back(["gw0"])
        one.done("a", took(7))  # its pause is over
        await drained(one)
        await beaten(one)
        one.done("b", took(7))
        await drained(one)
        assert await spent(client) == (14, 0)
        await client.flushdb()
        await asyncio.gather(beaten(one), beaten(other))
        await drained(one, other)
        assert await spent(client) == (14, 0)
