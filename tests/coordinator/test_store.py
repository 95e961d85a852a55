"""Up and down: a gateway's view of a store that hangs, dies, loses everything or comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio as redis

from coordinator import store_connection
from coordinator.errors import StoreDown, StoreError, StoreLate
from coordinator.placement import Placement, Reservation
from coordinator.pool.pool import Pool
from coordinator.store import Store, StoreOptions
from tests.coordinator.stage import KEYS, chain, drained, hash_of, numbers, place, replica, request, running
from tests.polling import eventually
from tests.redis_server import EACH_REDIS, RedisServer, running_redis, server_named

MISSES = 3


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_connection, "BREAKER_MISSES", MISSES)
    monkeypatch.setattr(store_connection, "OVERDUE_S", 0.5)


@pytest.fixture(params=EACH_REDIS)
def own_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server that a test may kill."""
    with running_redis(server_named(request.param)) as server:
        yield server


def store_at(server: RedisServer, gateway: str = "gw0", budget_s: float = 0.05) -> Store:
    return Store(StoreOptions(server.url, budget_s), gateway)


@pytest.fixture
async def store(own_server: RedisServer) -> AsyncIterator[Store]:
    async with running(store_at(own_server)) as store:
        yield store


async def serving(store: Store) -> Pool:
    pool = store.pool("m")
    for name in ("r0", "r1"):
        pool.register(replica(name))
    await drained(pool)
    return pool


async def miss(store: Store, pool: Pool, reservation: str) -> None:
    with pytest.raises(StoreLate) as caught:
        await pool.place(request(reservation, chain(reservation)))
    store.note(pool.name, caught.value)


async def misses(store: Store, pool: Pool) -> None:
    """So many placements in a row are late that placing pauses. What this process itself delays does not count."""
    missed = 0
    while store.is_up():
        assert missed < 10 * MISSES
        await miss(store, pool, f"late{missed}")
        missed += 1
    assert missed >= MISSES


async def test_one_late_placement_concerns_that_request_only(store: Store, own_server: RedisServer) -> None:
    changes: list[bool] = []
    store.on_change = lambda up, _reason: changes.append(up)
    pool = await serving(store)
    own_server.pause()
    await miss(store, pool, "late")
    own_server.resume()
    await drained(pool)
    await place(pool, "next", chain(1))
    store.note(pool.name, None)
    assert store.is_up()
    assert changes == []


async def test_delays_of_the_gateway_itself_pause_nothing(store: Store) -> None:
    pool = await serving(store)
    for _ in range(2 * MISSES):
        store.note(pool.name, StoreLate("this process was too busy", "gateway"))
        await asyncio.sleep(0.06)
    assert store.is_up()


async def test_a_hung_store_makes_calls_fail_at_once_and_comes_back_by_itself(
    store: Store, own_server: RedisServer
) -> None:
    changes: list[bool] = []
    store.on_change = lambda up, _reason: changes.append(up)
    pool = await serving(store)
    live = await place(pool, "live", chain("live"))
    own_server.pause()
    await misses(store, pool)
    assert "placements in a row" in store.reason
    with pytest.raises(StoreDown):
        pool.place(request("at once", chain(1))).send(None)
    own_server.resume()
    await eventually(store.is_up)
    assert changes == [False, True]
    await drained(pool)
    async with redis.Redis.from_url(own_server.url, decode_responses=True, protocol=2) as client:
        assert list(await hash_of(client, KEYS.flight("gw0"))) == ["live"]
        assert sum((await numbers(client, KEYS.active)).values()) == 1
        assert sum((await numbers(client, KEYS.owned_tokens)).values()) == 100
    assert (await place(pool, "after", chain("live"), pinned=live.replica)).matched_keys == 1


async def test_late_placements_pause_placing_and_keep_the_connection(store: Store, own_server: RedisServer) -> None:
    changes: list[bool] = []
    store.on_change = lambda up, _reason: changes.append(up)
    pool = await serving(store)
    wire = pool.link.wire
    await place(pool, "before", chain(1))
    own_server.pause()
    await misses(store, pool)
    assert store.is_connected(pool.name)
    pool.adopt(Reservation("fallback", "r1", "life1", 40, "-"))
    own_server.resume()
    await eventually(store.is_up)
    async with redis.Redis.from_url(own_server.url, decode_responses=True, protocol=2) as client:
        await eventually(lambda: client.hexists(KEYS.flight("gw0"), "fallback"))
    own_server.pause()
    await miss(store, pool, "late again")
    assert not store.is_up(), "until a placement is in time, the first late one pauses again"
    own_server.resume()
    await eventually(store.is_up)
    await place(pool, "after", chain(1))
    store.note(pool.name, None)
    own_server.pause()
    await miss(store, pool, "late alone")
    assert store.is_up()
    own_server.resume()
    assert pool.link.wire is wire
    assert changes == [False, True, False, True]


async def test_a_hung_store_is_noticed_without_any_placement(store: Store, own_server: RedisServer) -> None:
    await serving(store)
    own_server.pause()
    await eventually(lambda: not store.is_up())
    assert "overdue" in store.reason
    own_server.resume()
    await eventually(store.is_up)


async def test_a_pool_first_used_while_up_is_connected_at_once(store: Store) -> None:
    pool = store.pool("another")
    assert pool is store.pool("another")
    pool.register(replica("r0"))
    assert (await place(pool, "a", chain(1))).replica == "r0"


async def test_leaving_gives_back_and_is_not_undone_by_the_next_heartbeat(
    store: Store, own_server: RedisServer
) -> None:
    pool = await serving(store)
    await place(pool, "a", chain(1))
    await store.leave()
    with pytest.raises(StoreError):
        await pool.beat()
    async with redis.Redis.from_url(own_server.url, decode_responses=True, protocol=2) as client:
        assert await hash_of(client, KEYS.gateways) == {}
        assert await hash_of(client, KEYS.flight("gw0")) == {}
        assert await numbers(client, KEYS.active) == {}


async def test_leaving_a_store_that_is_down_is_no_error(own_server: RedisServer) -> None:
    own_server.kill()
    async with running(store_at(own_server)) as store:
        store.pool("m")
        await store.leave()


@pytest.mark.parametrize("turns", [1, 3, 10, 30])
async def test_it_can_be_stopped_while_it_connects(own_server: RedisServer, turns: int) -> None:
    own_server.pause()
    task = asyncio.ensure_future(store_at(own_server).run())
    for _ in range(turns):
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    own_server.resume()


async def test_what_an_operator_should_know_is_said(own_server: RedisServer) -> None:
    async with redis.Redis.from_url(own_server.url, decode_responses=True, protocol=2) as client:
        await client.config_set("maxmemory-policy", "allkeys-lru")
        version = int((await client.info("server"))["redis_version"].split(".")[0])
    async with running(store_at(own_server)) as store:
        said = " ".join(store.warnings)
    assert "volatile-lru" in said
    assert ("memory is full" in said) == (version < 7)


async def test_coordination_goes_on_when_the_memory_is_full(own_server: RedisServer) -> None:
    """LMCache's chunks may fill the memory. Scripts have the flag allow-oom if the server knows flags."""
    async with running(store_at(own_server)) as store:
        pool = await serving(store)
        async with redis.Redis.from_url(own_server.url, decode_responses=True, protocol=2) as client:
            version = int((await client.info("server"))["redis_version"].split(".")[0])
            await client.config_set("maxmemory", "100kb")
            with pytest.raises(redis.ResponseError):
                await client.set("chunk", "x")
            if version >= 7:
                assert (await place(pool, "a", chain(1))).why == "cold"
            else:
                with pytest.raises(StoreError):
                    await pool.place(request("a", chain(1)))
                assert await numbers(client, KEYS.active) == {}
            await client.config_set("maxmemory", "0")


async def test_a_gateway_whose_event_loop_is_busy_has_its_store_back_after_a_lost_connection(
    own_server: RedisServer,
) -> None:
    """Each turn takes 8 ms, and Redis answers at once."""
    async with running(store_at(own_server, budget_s=0.02)) as store:
        pool = await serving(store)
        changes: list[bool] = []
        store.on_change = lambda up, _reason: changes.append(up)

        async def work() -> None:
            while True:
                until = time.monotonic() + 0.008
                while time.monotonic() < until:
                    pass
                await asyncio.sleep(0)

        async def placed() -> Placement | None:
            """A machine with other work may take the 20 ms away from any one placement."""
            try:
                return await place(pool, f"r{time.monotonic_ns()}", chain(1))
            except StoreLate:
                return None

        working = asyncio.get_running_loop().create_task(work())
        try:
            async with redis.Redis.from_url(own_server.url, protocol=2) as client:
                await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await eventually(lambda: changes == [False, True])
            await eventually(placed)
        finally:
            working.cancel()
