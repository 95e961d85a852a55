"""A request is charged to its tenant and to its API key, and is let in only if both let it in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.accounts import AccountLimits, Limits, account_of_key
from coordinator.errors import NoRoom, OverLimit
from coordinator.keys import PoolKeys
from coordinator.maintenance.reaper import Reaper
from coordinator.maintenance.repair import Repair
from coordinator.placement import PlaceRequest, Reservation, Used
from coordinator.policy_knobs import PolicyKnobs
from tests.coordinator.queueing import ONE_EACH, asking, queued, two_gateways, waiting
from tests.coordinator.stage import KEYS, beaten, chain, drained, now_ms
from tests.polling import eventually
from tests.redis_server import RedisServer

PLENTY = PolicyKnobs()
ONE = "key:k-1"


def charged(
    name: str,
    tenant: dict[str, int],
    key: dict[str, int],
    key_id: str = "k-1",
    knobs: PolicyKnobs = PLENTY,
    **changes: Any,
) -> PlaceRequest:
    """A request of the tenant t with an API key; an account without limits is left out."""
    asked = asking(name, knobs, tenant=changes.pop("of", "t"), keys=chain(name), **changes)
    both = (("t", tenant), (account_of_key(key_id), key))
    asked.limits = Limits(tuple(AccountLimits(account, **limits) for account, limits in both if limits), 50)
    return asked


async def active(client: redis.Redis) -> dict[str, str]:
    """The requests in flight of each account."""
    counts = await client.hgetall(KEYS.tenants)
    return {
        field.split(" ")[1]: n for field, n in counts.items() if field.startswith("active ") and field.count(" ") == 1
    }


async def test_the_account_that_refuses_for_longest_is_told_and_a_refused_request_costs_no_account_anything(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        tenant, key = {"requests_per_min": 3}, {"requests_per_min": 2, "tokens_per_min": 100_000}
        for number in range(2):
            placed = await (one, other)[number].place(charged(f"r{number}", tenant, key))
            assert placed is not None
            assert [left.requests for left in placed.left] == [2 - number, 1 - number]
        filled = await client.hgetall(KEYS.tenants)
        with pytest.raises(OverLimit) as refused:
            await one.place(charged("more", tenant, key))
        assert (refused.value.limit, refused.value.at) == ("requests", 1)
        assert 25 < refused.value.wait_s <= 30
        assert await client.hgetall(KEYS.tenants) == filled
        assert await other.place(charged("another", tenant, key, key_id="k-2")) is not None
        with pytest.raises(OverLimit) as refused:
            await one.place(charged("by-both", tenant, key))
        assert refused.value.at == 1, "its bucket needs 30 s, and that of the tenant 20 s"
        with pytest.raises(OverLimit) as refused:
            await one.place(charged("by-both", tenant, {"requests_per_min": 30}))
        assert refused.value.at == 0, "its bucket needs 20 s, and that of the key 2 s"
        assert 15 < refused.value.wait_s <= 20


async def test_a_key_without_a_tenant_that_has_limits_is_an_account_of_its_own(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        assert await one.place(charged("only", {}, {"tokens_per_min": 6000})) is not None
        assert await active(client) == {ONE: "1"}
        one.done("only", Used(0, 0))
        await drained(one)
        assert await active(client) == {}


async def test_tokens_are_reserved_and_corrected_for_both_accounts_also_by_the_next_attempt(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        tenant, key = {"tokens_per_min": 60_000}, {"tokens_per_min": 6000, "concurrency": 5}
        first = await one.place(charged("first", tenant, key))
        assert first is not None
        again = charged("again", tenant, key)
        again.release, again.tried = "first", (first.replica,)
        second = await one.place(again)
        assert second is not None
        assert await active(client) == {"t": "1", ONE: "1"}
        one.done("again", Used(0, 1000))
        await drained(one)
        assert await client.exists(KEYS.budgets("gw0")) == 0
        following = await other.place(charged("next", tenant, key))
        assert following is not None
        reserved = following.backlog_tokens + 50
        assert [
            abs(of - left.tokens - 1000 - reserved) < 300
            for of, left in zip((60_000, 6000), following.left, strict=True)
        ] == [True, True]
        assert [left.active for left in following.left] == [None, 1]


async def test_requests_of_a_key_wait_for_each_other_and_other_keys_of_the_tenant_pass(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        tenant, key = {"concurrency": 3}, {"concurrency": 1}
        order: list[str] = []
        assert await one.place(charged("first", tenant, key)) is not None
        parked = []
        for name in ("second", "third"):
            task = await queued(client, other, charged(name, tenant, key))
            task.add_done_callback(lambda _, name=name: order.append(name))
            parked.append(task)
        assert await other.place(charged("of-another-key", tenant, key, "k-2")) is not None
        assert await one.place(charged("of-a-key-without-limits", tenant, {})) is not None
        by_tenant = await queued(client, one, charged("the-tenant-has-enough", tenant, {}))
        one.done("first")  # then the tenant has two, and the key none
        await eventually(lambda: order == ["second"] or by_tenant.done())
        other.done("of-another-key")
        one.done("of-a-key-without-limits")
        await by_tenant
        assert order == ["second"]
        newcomer = await queued(client, one, charged("newcomer", tenant, key))
        other.done("second")
        await parked[1]
        assert not newcomer.done()
        other.done("third")
        assert await newcomer is not None
        for pool, name in ((one, "newcomer"), (one, "the-tenant-has-enough")):
            pool.done(name)
        await drained(one, other)
        assert await active(client) == {}
        assert await client.exists(KEYS.patient, KEYS.waiting) == 0


async def test_however_many_requests_of_a_key_came_first_another_key_gets_the_next_room(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    knobs, key = PolicyKnobs(max_active_requests=1), {"concurrency": 1}
    async with two_gateways(redis_server, 2) as (one, other):
        for number in range(2):
            assert await one.place(asking(f"busy{number}", knobs)) is not None
        crowd = [await queued(client, other, charged(f"c{number}", {}, key, knobs=knobs)) for number in range(30)]
        late = await queued(client, other, charged("late", {}, {"concurrency": 1}, "k-2", knobs=knobs))
        one.done("busy0")
        assert await crowd[0] is not None
        one.done("busy1")  # one event: the others of the key are passed at once
        assert await late is not None
        assert await waiting(client) == 29
        for each in crowd[1:]:
            each.cancel()
        await asyncio.wait(crowd[1:])
        await eventually(lambda: nobody_waits(client))
        assert await client.exists(KEYS.patient) == 0


async def nobody_waits(client: redis.Redis) -> bool:
    return await waiting(client) == 0


async def test_requests_that_wait_for_their_key_count_for_what_a_tenant_may_queue(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    knobs = PolicyKnobs(max_waiting_per_tenant=2)
    async with two_gateways(redis_server) as (one, other):
        tasks = []
        for key_id in ("k-1", "k-2"):
            assert await one.place(charged(f"runs-{key_id}", {}, {"concurrency": 1}, key_id, knobs)) is not None
            tasks.append(await queued(client, other, charged(f"waits-{key_id}", {}, {"concurrency": 1}, key_id, knobs)))
        assert await one.place(charged("runs-k-3", {}, {"concurrency": 1}, "k-3", knobs)) is not None
        with pytest.raises(NoRoom) as refused:
            await other.place(charged("too-many", {}, {"concurrency": 1}, "k-3", knobs))
        assert refused.value.reason == "full_tenant"
        one.done("runs-k-1")
        one.done("runs-k-2")
        await asyncio.gather(*tasks)


async def test_a_slot_of_a_key_that_another_pool_frees_is_used_by_the_request_that_came_first(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        await client.hset(PoolKeys("elsewhere").leases, "tick", await now_ms(client))
        await client.hset(KEYS.tenants, mapping={f"active {ONE}": 1, f"active {ONE} elsewhere": 1})
        late = [await queued(client, one, charged(f"late{number}", {}, {"concurrency": 1})) for number in range(2)]
        await client.hdel(KEYS.tenants, f"active {ONE}", f"active {ONE} elsewhere")
        newcomer = await queued(client, other, charged("newcomer", {}, {"concurrency": 1}))
        await beaten(other)
        assert await late[0] is not None
        assert not late[1].done()
        one.done("late0")
        assert await late[1] is not None
        assert not newcomer.done()
        one.done("late1")
        assert await newcomer is not None


async def test_a_gateway_that_leaves_takes_its_requests_out_of_the_queue_and_of_what_is_counted_of_tenants(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        tenant, key = {"concurrency": 3}, {"concurrency": 1}
        assert await one.place(charged("first", tenant, key)) is not None
        tasks = [await queued(client, other, charged(name, tenant, key)) for name in ("second", "third")]
        stays = await queued(client, one, charged("stays", tenant, key))
        assert await client.hget(KEYS.patient, "parked t") == "3"
        await other.leave()
        assert await client.hget(KEYS.patient, "parked t") == "1"
        assert await waiting(client) == 1
        for task in tasks:
            task.cancel()
        one.done("first")
        assert await stays is not None
        one.done("stays")
        await drained(one)


async def test_a_parked_request_gets_its_turn_among_others_although_nothing_of_its_key_ends_any_more(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """The request that had got its turn when the last one ended has left the queue."""
    key = {"concurrency": 1}
    async with two_gateways(redis_server, 1) as (one, other):
        assert await one.place(charged("first", {}, key, knobs=ONE_EACH)) is not None
        second, third = [
            await queued(client, other, charged(name, {}, key, knobs=ONE_EACH)) for name in ("second", "third")
        ]
        rest = [await queued(client, one, asking(f"another{number}", tenant="a")) for number in range(2)]
        await client.hincrby(KEYS.active, "r0", 1)  # so that the end of the first one makes no room
        one.done("first")
        await drained(one)
        second.cancel()
        await asyncio.wait([second])
        await drained(other)
        await beaten(one)
        await client.hincrby(KEYS.active, "r0", -1)
        await beaten(one)
        await eventually(rest[0].done)
        one.done("another0")
        await eventually(lambda: third.done() or rest[1].done())
        assert third.done()
        other.done("third")
        assert await rest[1] is not None


async def test_a_request_that_its_key_lets_in_waits_for_its_tenant(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        tenant, key = {"concurrency": 1}, {"concurrency": 1}
        await client.hset(KEYS.tenants, f"active {ONE}", 1)
        assert await one.place(charged("first", tenant, {})) is not None
        late = await queued(client, other, charged("late", tenant, key))
        await client.hdel(KEYS.tenants, f"active {ONE}")
        await beaten(other)
        assert not late.done()
        one.done("first")
        assert await late is not None


@pytest.mark.parametrize("removed", ["line", "turns", "line and turns"])
async def test_a_waiting_request_of_a_key_is_put_back_when_somebody_has_removed_its_place(
    redis_server: RedisServer, client: redis.Redis, removed: str
) -> None:
    async with two_gateways(redis_server) as (one, other):
        assert await one.place(charged("first", {}, {"concurrency": 1})) is not None
        task = await queued(client, other, charged("second", {}, {"concurrency": 1}))
        keys = [key for name in removed.split(" and ") for key in await client.keys(f"*:{name}:*")]
        await client.delete(*keys)
        await beaten(other)
        one.done("first")
        assert await task is not None


async def test_the_accounts_of_a_dead_gateway_get_their_slots_back_and_are_counted_again_from_the_entries(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        both = {"concurrency": 5}
        assert await one.place(charged("mine", both, both)) is not None
        assert await other.place(charged("its", both, both)) is not None
        await client.hset(KEYS.tenants, mapping={"active t": 7, f"active {ONE}": 8})
        await Repair(one).repair_all()
        assert await active(client) == {"t": "2", ONE: "2"}
        await client.hset(KEYS.gateways, "gw1", "1 1")
        await Reaper(one).give_back(["gw1"])
        assert await active(client) == {"t": "1", ONE: "1"}
        assert await client.hgetall(KEYS.budgets("gw1")) == {
            "its": f"t {await tokens(client, 'gw1', 'its')} 0 0 / {ONE} 0"
        }


async def tokens(client: redis.Redis, gateway: str, reservation: str) -> str:
    entry: str = await client.hget(KEYS.budgets(gateway), reservation)
    return entry.split(" ")[1]


async def test_an_entry_that_an_older_gateway_wrote_is_settled_for_its_tenant(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, _):
        assert await one.place(charged("old", {"concurrency": 5}, {})) is not None
        assert await client.hget(KEYS.budgets("gw0"), "old") == f"t {await tokens(client, 'gw0', 'old')} 0 1"
        await client.hset(KEYS.budgets("gw0"), "old", "t 70 6000 1")
        one.done("old", Used(0, 10))
        await drained(one)
        assert await active(client) == {}


async def test_what_a_gateway_let_in_by_itself_counts_for_both_accounts(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with two_gateways(redis_server) as (one, other):
        tenant = {"requests_per_min": 10, "tokens_per_min": 60_000}
        key = {"requests_per_min": 5, "tokens_per_min": 6000}
        for name in ("over", "runs"):
            asked = charged(name, tenant, key)
            one.adopt(Reservation(name, "r1", "life1", 100, "-", asked.budget(100, requests=1)))
        one.done("over", Used(0, 300))
        one.reservations.count_adopted()
        await drained(one)
        assert await active(client) == {"t": "1", ONE: "1"}
        one.done("runs", Used(0, 300))
        one.reservations.count_adopted()
        await drained(one)
        assert await active(client) == {}
        following = await other.place(charged("next", tenant, key))
        assert following is not None
        assert [left.requests for left in following.left] == [7, 2]
        used = 600 + following.backlog_tokens + 50
        assert [
            abs(of - left.tokens - used) < 300 for of, left in zip((60_000, 6000), following.left, strict=True)
        ] == [True, True]
