"""A Redis Cluster of three masters: each pool, with all of its keys, is on the master that has its slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import pytest

from coordinator.agent.agent_store import AgentStore
from coordinator.errors import StoreRefused
from coordinator.keys import WATCHER, PoolKeys
from coordinator.placement import Placement, Prefill
from coordinator.pool import hedged
from coordinator.pool.demand import read_demand
from coordinator.pool.draining import drain
from coordinator.pool.pool import Pool
from coordinator.pool.resumed import turn_s
from coordinator.records import AuditNote, RecordChange, RecordStore
from coordinator.redis.wire import Operands, Wire
from coordinator.scripts import NAMES, Script
from coordinator.store import Store, StoreOptions
from coordinator.store_connection import RETRY_S
from coordinator.subset import Subset
from coordinator.survey import Survey
from tests.coordinator.stage import beaten, chain, drained, place, register, replica, request, running
from tests.coordinator.test_acl import keep_records, keep_usage, live_a_little, spend, tell
from tests.coordinator.watch.stage import watching
from tests.polling import eventually
from tests.redis_groups import RedisCluster, client_of, running_redis_cluster
from tests.redis_server import EACH_REDIS, server_named


@pytest.fixture(scope="module", params=EACH_REDIS)
def cluster(request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    with running_redis_cluster(server_named(request.param)) as cluster:
        yield cluster


@pytest.fixture
async def store(cluster: RedisCluster) -> AsyncIterator[Store]:
    async with running(Store(StoreOptions(cluster.url, budget_s=5.0), "gw0")) as store:
        yield store


def pool_on(cluster: RedisCluster, index: int) -> str:
    """The name of a pool whose slot this node has."""
    names = (f"model-{number}" for number in range(1000))
    return next(name for name in names if cluster.owner(PoolKeys(name).anchor) is cluster.nodes[index])


async def place_pair(pool: Pool) -> None:
    paired = request("paired", [])
    paired.serving, paired.prefill = Subset.of(["r0", "r1"]), Prefill(Subset.of(["r2"]), 1)
    placement = await pool.place(paired)
    assert isinstance(placement, Placement)
    assert placement.prefill is not None


async def test_every_script_finds_all_of_its_keys_on_one_node(
    store: Store, cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: set[str] = set()
    enqueue = Wire._enqueue_script

    def noting(self: Wire, call: Any, script: Script, operands: Operands) -> None:
        ran.add(script.name)
        enqueue(self, call, script, operands)

    monkeypatch.setattr(Wire, "_enqueue_script", noting)
    pool = store.pool("m")
    await eventually(lambda: store.is_up("m"))
    await live_a_little(pool)
    await eventually(lambda: store.is_up("m"))
    await register(pool, 20)
    await place(pool, "among many", [])
    await place_pair(pool)
    await eventually(lambda: "reorder" in ran)
    await tell(store, cluster.url)
    await keep_records(store)
    await keep_usage(store)
    await spend(pool)
    await client_hset(cluster, pool.keys.gateways, "gw9", "1 1")
    await client_hset(cluster, pool.keys.owned_tokens, "r0", "x")
    await beaten(pool)
    change = RecordChange("key/a", b"", b"1 live mac {}")
    assert await RecordStore(store, "").put([change], AuditNote("ops", "create", "a"))
    pool.seats.leave(request("left", []))
    pool.tell("requeue", gateway="gw0", digest="0" * 32, seats=["gone"])
    assert (await drain(pool.run, "r1")).state == "draining"
    assert (await read_demand(pool.run, 1.0)).draining_replicas == 1
    assert await turn_s(pool.run) == 0
    await hedged.tell(pool.run, 1, {})
    await drained(pool)
    await eventually(lambda: "repair" in ran)
    chunks = (f"kvchunk@m@01000100@0@{number:064x}" for number in range(1000))
    watched = next(chunk for chunk in chunks if cluster.owner(chunk) is cluster.owner(WATCHER))
    cluster.run(cluster.owner(WATCHER), "SET", watched, "KV")
    async with watching(cluster.url) as watcher:
        await eventually(lambda: watcher.report is not None and watcher.report.ttls_given == 1)
    assert set(NAMES) - ran == {"reassert", "declare", "route"}, "sent with their text, or for one Redis"
    errors: set[str] = set()
    for node in cluster.nodes:
        with client_of(node) as client:
            errors |= {name.removeprefix("errorstat_") for name in client.info("errorstats")}
    assert errors <= {"NOSCRIPT", "MOVED", "ERR"}, "CROSSSLOT above all"
    with client_of(cluster.owner(pool.keys.anchor)) as client:
        assert len(client.keys("kvgate:{m}:*")) > 5


async def client_hset(cluster: RedisCluster, key: str, field: str, value: str) -> None:
    cluster.run(cluster.owner(key), "HSET", key, field, value)


async def test_pools_on_different_nodes_serve_beside_each_other(store: Store, cluster: RedisCluster) -> None:
    names = [pool_on(cluster, index) for index in range(3)]
    for name in names:
        pool = store.pool(name)
        pool.register(replica("r0"))
        await eventually(lambda name=name: store.is_up(name))
        assert (await place(pool, "a", chain(1))).why == "cold"
        assert (await place(pool, "b", chain(1))).why == "hit"
        await drained(pool)
    for name, node in zip(names, cluster.nodes, strict=True):
        with client_of(node) as client:
            assert client.hgetall(PoolKeys(name).active) == {"r0": "2"}
    assert store.is_up()


async def test_every_pool_is_known_wherever_its_keys_are(cluster: RedisCluster) -> None:
    names = [pool_on(cluster, index) for index in range(3)]
    for name in names:
        link = await AgentStore.open(cluster.url, name, "r0", "agent0")
        await link.close()
    survey = await Survey.open(cluster.url, 5.0)
    assert set(names) <= set(await survey.pools())
    await survey.close()


async def test_what_others_keep_on_another_node_is_refused_and_the_agent_goes_on(cluster: RedisCluster) -> None:
    """LMCache's chunks may be on another node."""
    link = await AgentStore.open(cluster.url, "m", "r0", "agent0")
    node = cluster.owner(link.keys.anchor)
    elsewhere = next(f"kv@{n}" for n in range(1000) if cluster.owner(f"kv@{n}") is not node)
    with pytest.raises(StoreRefused, match="MOVED"):
        await link.ask("STRLEN", elsewhere)
    assert await link.ask("EXISTS", link.keys.anchor) == 0
    await link.close()


async def test_a_pool_whose_slot_moves_is_down_meanwhile_and_up_on_the_other_node(
    store: Store, cluster: RedisCluster
) -> None:
    name = pool_on(cluster, 0)
    other = store.pool(pool_on(cluster, 1))
    other.register(replica("r0"))
    pool = store.pool(name)
    pool.register(replica("r0"))
    await eventually(store.is_up)
    await place(pool, "before", chain("moved"))
    with cluster.moving(pool.keys.anchor, to=cluster.nodes[2]):
        await eventually(lambda: not store.is_up(name))
        assert "ASK" in store.reason or "TRYAGAIN" in store.reason
        assert store.is_up(other.name)
        assert (await place(other, "meanwhile", chain(1))).replica == "r0"
    await eventually(store.is_up)
    assert (await place(pool, "after", chain("moved"))).why == "hit"
    await drained(pool)
    with client_of(cluster.nodes[2]) as client:
        assert client.hgetall(pool.keys.active) == {"r0": "2"}


async def test_a_node_addressed_as_a_single_redis_is_told_of(cluster: RedisCluster) -> None:
    node = cluster.owner(PoolKeys("m").anchor)
    async with running(Store(StoreOptions(node.url, budget_s=5.0), "gw0")) as store:
        assert any("redis+cluster://" in warning for warning in store.warnings)
        store.pool(pool_on(cluster, (cluster.nodes.index(node) + 1) % 3))
        await eventually(lambda: "MOVED" in store.reason)


async def test_a_connection_that_breaks_at_the_first_call_is_not_opened_without_pause(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_at, open_wire = [], Wire.open

    async def noting(*args: Any) -> Wire:
        opened_at.append(asyncio.get_running_loop().time())
        return await open_wire(*args)

    monkeypatch.setattr(Wire, "open", noting)
    node = cluster.owner(PoolKeys("m").anchor)
    elsewhere = pool_on(cluster, (cluster.nodes.index(node) + 1) % 3)
    store = Store(StoreOptions(node.url, budget_s=5.0), "gw0")
    store.pool(elsewhere)
    async with running(store):
        await eventually(lambda: len(opened_at) >= 4)
    assert all(later - earlier >= RETRY_S for earlier, later in pairwise(opened_at))


async def test_a_survey_looks_at_each_pool_where_it_is(store: Store, cluster: RedisCluster) -> None:
    names = [pool_on(cluster, index) for index in range(3)]
    for name in names:
        store.pool(name).register(replica(f"r-{name}"))
        await eventually(lambda name=name: store.is_up(name))
    survey = await Survey.open(cluster.url, 5.0)
    try:
        info = (await survey.redis()).info
        assert info is not None
        assert info.mode == "cluster"
        for name in names:

            async def is_seen(name: str = name) -> bool:
                snapshot = await (await survey.for_pool(name)).snapshot(name)
                return f"r-{name}" in snapshot.state.replicas and "gw0" in snapshot.gateway_leases_ms

            await eventually(is_seen)
    finally:
        await survey.close()


async def test_keys_that_belong_to_no_pool_are_found_on_whatever_node_they_are(
    store: Store, cluster: RedisCluster
) -> None:
    keys = [f"kvgate:test-{number}" for number in range(64)]
    of_nodes = [next(key for key in keys if cluster.owner(key) is node) for node in cluster.nodes]
    await eventually(lambda: store.is_up())
    for key in of_nodes:
        assert await store.ask("HSET", key, "a", "1") == 1
        assert await store.ask("HGETALL", key) == [b"a", b"1"]
