"""Replicas that moved, stopped or restarted between two checks of the gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster
from coordinator.keys import PoolKeys, pool_slug
from tests.cluster.clients import ask, held_stream
from tests.cluster.gateways import GatewayProcess, another_gateway
from tests.cluster.ledger import Ledger
from tests.cluster.places import running_place
from tests.cluster.servers import another_server
from tests.forked import constants
from tests.polling import eventually

MODEL = "kvgate/moves"


@pytest.fixture
def short_memory() -> Iterator[None]:
    with constants({"gateway.replicas.health_checks.FORGET_S": 1}):
        yield


async def test_gateways_started_anew_find_moved_replicas_at_once_and_gone_ones_soon(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with AsyncExitStack() as before:
        first = await before.enter_async_context(another_server(http, tmp_path, "--model", MODEL))
        second = await before.enter_async_context(another_server(http, tmp_path, "--model", MODEL))
        replicas = [{"id": "moves", "url": first.url}, {"id": "goes", "url": second.url}]
        earlier = await before.enter_async_context(another_gateway(cluster, "earlier", replicas=replicas))
        assert (await ask(http, earlier.url, "hello")).status_code == 200
    async with (
        another_server(http, tmp_path, "--model", MODEL) as moved,
        another_gateway(cluster, "later", replicas=[{"id": "moves", "url": moved.url}]) as later,
        redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as client,
    ):
        assert (await ask(http, later.url, "hello")).headers["x-kvgate-replica"] == "moves"
        ledger = Ledger(client, pool_slug(MODEL))
        assert (await ledger.replicas())["moves"].url == moved.url
        await eventually(lambda: is_dead(ledger, "goes"))
        for n in range(4):
            assert (await ask(http, later.url, f"hello {n}")).headers["x-kvgate-replica"] == "moves"


async def test_a_replica_that_left_the_configuration_gets_nothing_though_it_lives(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with (
        another_server(http, tmp_path, "--model", MODEL) as stays,
        another_server(http, tmp_path, "--model", MODEL) as leaves,
    ):
        both = [{"id": "stays", "url": stays.url}, {"id": "leaves", "url": leaves.url}]
        async with another_gateway(cluster, "before", replicas=both) as before:
            reached = {(await ask(http, before.url, f"{n}")).headers["x-kvgate-replica"] for n in range(12)}
            assert reached == {"stays", "leaves"}
        async with another_gateway(cluster, "after", replicas=both[:1]) as after:
            for n in range(12):
                assert (await ask(http, after.url, f"{n}")).headers["x-kvgate-replica"] == "stays"


async def test_requests_that_wait_are_served_by_a_replica_that_comes_later(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    model = "kvgate/grows"
    async with (
        another_server(http, tmp_path, "--model", model) as first,
        another_server(http, tmp_path, "--model", model) as late,
    ):
        late.kill()
        settings = {
            "replicas": [{"id": "first", "url": first.url}, {"id": "late", "url": late.url}],
            "policy": {"max_active_requests": 1},
        }
        async with (
            another_gateway(cluster, "grows", **settings) as one,
            another_gateway(cluster, "grows-too", **settings) as other,
            redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as client,
        ):
            await http.post(f"{first.url}/sim/fail", json={"mode": "hang", "after_tokens": 1})
            async with held_stream(http, one.url, "hello"):
                urls = one.url, other.url, one.url, other.url
                loop = asyncio.get_running_loop()
                tasks = [loop.create_task(ask(http, url, f"hello {n}")) for n, url in enumerate(urls)]
                await eventually(lambda: are_waiting(client, model, len(tasks)))
                late.start()
                for task in tasks:
                    assert (await task).headers["x-kvgate-replica"] == "late"


async def are_waiting(client: redis.Redis, model: str, count: int) -> bool:
    return sum(map(int, await client.hvals(PoolKeys(pool_slug(model)).waiting))) == count


@pytest.mark.usefixtures("short_memory")
async def test_a_replica_that_is_gone_for_good_is_forgotten(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with (
        another_server(http, tmp_path, "--model", MODEL) as stays,
        redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as client,
    ):
        kept = [{"id": "kept", "url": stays.url}]
        ledger = Ledger(client, pool_slug(MODEL))
        async with AsyncExitStack() as before:
            server = await before.enter_async_context(another_server(http, tmp_path, "--model", MODEL))
            listed = [*kept, {"id": "shrunk", "url": server.url}]
            earlier = await before.enter_async_context(another_gateway(cluster, "wide", replicas=listed))
            reached = {(await ask(http, earlier.url, f"{n}")).headers["x-kvgate-replica"] for n in range(12)}
            assert reached == {"kept", "shrunk"}
        async with (
            another_gateway(cluster, "narrow", replicas=kept) as one,
            another_gateway(cluster, "narrow2", replicas=kept) as two,
        ):
            await eventually(lambda: is_forgotten(ledger, client, "shrunk"))
            for n in range(4):
                for gateway in (one, two):
                    assert (await ask(http, gateway.url, f"{n}")).headers["x-kvgate-replica"] == "kept"


async def is_forgotten(ledger: Ledger, client: redis.Redis, replica: str) -> bool:
    keys = [key async for key in client.scan_iter(f"*{replica}*")]
    return replica not in await ledger.replicas() and not keys


async def is_dead(ledger: Ledger, replica: str) -> bool:
    return (await ledger.replicas())[replica].state == "dead"


async def test_the_life_of_a_replica_is_not_renamed_by_a_worker_that_is_not_configured_with_it(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    model = "kvgate/joins"
    async with (
        another_server(http, tmp_path, "--model", model) as first,
        another_server(http, tmp_path, "--model", model) as second,
        redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as client,
    ):
        replicas = [{"id": "stays", "url": first.url}, {"id": "joins", "url": second.url}]
        ledger = Ledger(client, pool_slug(model))
        async with (
            another_gateway(cluster, "worker", replicas=replicas[:1]) as worker,
            another_gateway(cluster, "newer", replicas=replicas),
        ):
            await eventually(lambda: is_registered(ledger, "joins"))
            before = (await ledger.replicas())["joins"]
            await eventually(lambda: '"replica": "joins", "alive": true' in worker.log.read_text())
            after = (await ledger.replicas())["joins"]
            assert (after.incarnation, after.capacity_tokens) == (before.incarnation, before.capacity_tokens)
            assert not after.incarnation.startswith("life-")


async def test_a_gateway_that_left_a_pool_and_does_its_maintenance_finds_newcomers_dead(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    model = "kvgate/left"
    async with (
        running_place("kubernetes", tmp_path) as place,
        another_server(http, tmp_path, "--model", model) as stays,
        another_server(http, tmp_path, "--model", model) as dies,
        another_server(http, tmp_path, "--model", "kvgate/elsewhere") as other,
        redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as client,
    ):
        await place.hold([stays])
        ledger, keys = Ledger(client, pool_slug(model)), PoolKeys(pool_slug(model))
        async with another_gateway(cluster, "left", replicas=[], discovery=place.discovery) as left:
            await place.hold([other])
            await eventually(lambda: serves(http, left, "kvgate/elsewhere"))
            newcomers = [{"id": "stays", "url": stays.url}, {"id": "dies", "url": dies.url}]
            async with another_gateway(cluster, "came", replicas=newcomers):
                await eventually(lambda: is_registered(ledger, "dies"))
                assert (await client.hget(keys.leases, "worker")).startswith("left.")
                dies.kill()
                await eventually(lambda: is_dead(ledger, "dies"))


async def serves(http: httpx.AsyncClient, gateway: GatewayProcess, model: str) -> bool:
    cards = (await http.get(f"{gateway.url}/v1/models")).json()["data"]
    return [card["root"] for card in cards] == [model]


async def is_registered(ledger: Ledger, replica: str) -> bool:
    return replica in await ledger.replicas()
