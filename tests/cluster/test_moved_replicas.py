"""What an earlier set of gateways left in the store about replicas that have moved or gone since."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import redis.asyncio as redis

from bench.cluster import Cluster
from coordinator.keys import pool_slug
from tests.cluster.clients import ask
from tests.cluster.gateways import another_gateway
from tests.cluster.ledger import Ledger
from tests.cluster.servers import another_server
from tests.polling import eventually

MODEL = "kvgate/moves"


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


async def is_dead(ledger: Ledger, replica: str) -> bool:
    return (await ledger.replicas())[replica].state == "dead"
