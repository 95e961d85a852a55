"""A gateway reasserts its reservations: after a reconnect, on an empty store, or for a request placed without the
store."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreDown
from coordinator.placement import Reservation
from coordinator.pool.pool import Pool
from coordinator.subset import Subset
from tests.coordinator.stage import (
    KEYS,
    calls_of,
    chain,
    drained,
    hash_of,
    joined,
    now_ms,
    numbers,
    place,
    register,
    replica,
    request,
)
from tests.redis_server import RedisServer

TIP = chain("tip")[0]


async def test_reasserting_an_unchanged_state_changes_only_epoch_and_lease(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    for i in range(5):
        await place(pool, f"id{i}", chain(i))
    pool.first_token("id0")
    await drained(pool)
    before = [await hash_of(client, key) for key in (KEYS.flight("gw0"), KEYS.active, KEYS.backlog_tokens)]
    epoch = (await hash_of(client, KEYS.gateways))["gw0"].split(" ")[0]
    await client.config_resetstat()
    pool.reassert()
    await drained(pool)
    calls = await calls_of(client)
    assert [await hash_of(client, key) for key in (KEYS.flight("gw0"), KEYS.active, KEYS.backlog_tokens)] == before
    assert calls["hset"] == 1
    assert calls.get("hincrby", 0) == 0
    now_epoch, until_ms = (await hash_of(client, KEYS.gateways))["gw0"].split(" ")
    assert int(now_epoch) == int(epoch) + 1
    assert 2000 < int(until_ms) - await now_ms(client) <= 3000


async def test_what_is_not_stated_is_dropped_and_given_back(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "kept", chain(1))
    await place(pool, "lost", chain(2))
    pool.live.pop("lost")
    pool.reassert()
    await drained(pool)
    assert list(await hash_of(client, KEYS.flight("gw0"))) == ["kept"]
    assert await numbers(client, KEYS.active) == {"r0": 1}
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 100}


async def test_a_placement_on_its_way_survives_a_reassertion_that_does_not_know_its_outcome(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    pool.placer.placing.add("a")
    await place(pool, "a", chain(1))
    pool.live.pop("a")
    pool.placer.placing.add("a")
    pool.reassert()
    await drained(pool)
    assert list(await hash_of(client, KEYS.flight("gw0"))) == ["a"]
    assert await numbers(client, KEYS.active) == {"r0": 1}


async def test_a_place_of_an_older_epoch_is_refused(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    asked = request("old", chain(1), serving=Subset.of(["r0"]))
    wire = pool.link.wire
    assert wire is not None
    script = pool.link.required().script("place")
    old = asked.operands(script, KEYS, "gw0", pool.link.epoch, explain=False)
    pool.reassert()
    reply = await wire.run(script, old)
    assert reply == [b"stale"]
    assert await numbers(client, KEYS.active) == {}
    assert await client.exists(KEYS.own(chain(1)[0])) == 0


async def test_a_store_that_lost_data_and_scripts_counts_every_live_request_at_the_next_place(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 2)
    for i in range(4):
        await place(pool, f"id{i}", chain(i), pinned=f"r{i % 2}")
    pool.first_token("id0")
    await drained(pool)
    await client.flushall()
    await client.script_flush()
    await place(pool, "next", chain(1), pinned="r0")
    await drained(pool)
    assert sorted(await hash_of(client, KEYS.flight("gw0"))) == sorted(pool.live)
    assert await numbers(client, KEYS.active) == {"r0": 3, "r1": 2}
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 200, "r1": 200}


async def test_a_place_for_which_the_store_has_lost_the_replicas_states_them_again(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 2)
    await client.delete(KEYS.replicas)
    epoch = pool.link.epoch
    assert await pool.place(request("a", chain(1), pinned="r2")) is None
    assert await pool.place(request("b", chain(1), tried=("r0", "r1"))) is None
    assert await pool.place(request("c", chain(1), serving=Subset.of(["r2"]))) is None
    assert pool.link.epoch == epoch
    assert (await place(pool, "d", chain(1), serving=Subset.of(["r1", "r2"]), tried=("r0",))).replica == "r1"


async def test_a_gateway_whose_name_another_life_holds_under_a_newer_epoch_changes_nothing(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await client.hset(KEYS.gateways, "gw0", f"99 {await now_ms(client) + 3000}")
    await client.hset(KEYS.flight("gw0"), "theirs", "r0 life1 1 100 -")
    pool.reassert()
    with pytest.raises(StoreDown):
        await pool.place(request("mine", chain(1)))
    assert list(await hash_of(client, KEYS.flight("gw0"))) == ["theirs"]


async def test_a_reservation_on_an_incarnation_that_is_not_current_is_not_counted(
    pool: Pool, client: redis.Redis
) -> None:
    """Otherwise, if that incarnation is registered later, the release would subtract load that was never added."""
    await register(pool, 1, incarnation="life2")
    pool.live["a"] = Reservation("a", "r0", "life1", 100, TIP)
    pool.reassert()
    pool.adopt(Reservation("b", "r0", "life1", 100, TIP))
    pool.reservations.count_adopted()
    pool.register(replica("r0", "life1"))
    pool.done("a")
    pool.done("b")
    await drained(pool)
    assert await hash_of(client, KEYS.active) == {"r0": "0"}
    assert await hash_of(client, KEYS.backlog_tokens) == {"r0": "0"}


async def test_a_request_placed_without_the_store_is_counted_and_settled_like_any_other(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 2)
    await place(pool, "a", chain(1), pinned="r0")
    pool.adopt(Reservation("b", "r1", "life1", 250, TIP))
    pool.reservations.count_adopted()
    await drained(pool)
    assert await numbers(client, KEYS.active) == {"r0": 1, "r1": 1}
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 100, "r1": 250}
    pool.first_token("b")
    pool.done("b")
    pool.reservations.count_adopted()
    await drained(pool)
    assert await numbers(client, KEYS.active) == {"r0": 1}


async def test_an_adopted_request_replaces_the_placement_that_came_too_late(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    await place(pool, "a", chain(1), pinned="r0")
    pool.adopt(Reservation("a", "r1", "life1", 300, TIP))
    pool.reservations.count_adopted()
    await drained(pool)
    assert await numbers(client, KEYS.active) == {"r1": 1}
    assert await numbers(client, KEYS.backlog_tokens) == {"r1": 300}


async def test_adopting_costs_the_same_however_many_requests_are_in_flight(pool: Pool, client: redis.Redis) -> None:
    """A gateway adopts requests when the store is slow. Adopting must not slow the store down further."""
    await register(pool, 20)
    for i in range(50):
        pool.live[f"id{i}"] = Reservation(f"id{i}", f"r{i % 20}", "life1", 10, TIP)
    pool.reassert()
    await drained(pool)
    await client.config_resetstat()
    pool.adopt(Reservation("late", "r1", "life1", 10, TIP))
    pool.reservations.count_adopted()
    await drained(pool)
    assert (await calls_of(client))["hset"] == 2
    assert (await calls_of(client)).get("hgetall", 0) == 0
    assert sum((await numbers(client, KEYS.active)).values()) == 51


async def test_a_request_placed_while_there_was_no_connection_is_stated_on_the_next(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    pool = Pool("m", "gw0", 1.0)
    pool.register(replica("r0"))
    pool.adopt(Reservation("a", "r0", "life1", 70, TIP))
    pool.adopt(Reservation("b", "r0", "life1", 70, TIP))
    pool.first_token("b")
    async with joined(redis_server.url) as connected:
        assert connected.link.wire is not None
        pool.attach(connected.link.wire)
        await drained(pool)
        assert await numbers(client, KEYS.active) == {"r0": 2}
        assert await numbers(client, KEYS.backlog_tokens) == {"r0": 70}


async def test_a_returning_gateway_does_not_undo_what_it_missed(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    await register(pool, 1)
    async with joined(redis_server.url, "gw1") as other:
        await other.register(replica("r0", "life2"))
    pool.reassert()
    await drained(pool)
    assert (await hash_of(client, KEYS.replicas))["r0"].split(" ")[0] == "life2"
