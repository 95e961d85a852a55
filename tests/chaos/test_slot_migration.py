"""Gateways on a Redis Cluster: two models whose keys are on different masters, and a slot that moves under load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, running_gateways, running_replicas
from coordinator.keys import PoolKeys
from tests.api.stage import PATIENT_REDIS
from tests.cluster.clients import Load, ask, prose, running_load
from tests.cluster.ledger import Ledger
from tests.polling import eventually
from tests.redis_groups import RedisCluster, running_redis_cluster

CONFIG: dict[str, Any] = {"redis": PATIENT_REDIS}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RedisCluster]:
    with running_redis_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def models(nodes: RedisCluster) -> list[str]:
    """The names of two models. The first model's keys are on the first node, the second model's on the second node."""
    names = [f"model-{number}" for number in range(1000)]
    return [next(name for name in names if nodes.owner(PoolKeys(name).anchor) is node) for node in nodes.nodes[:2]]


@pytest.fixture(scope="module")
def cluster(nodes: RedisCluster, models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two gateways, two replicas of the first model and one of the second."""
    with ExitStack() as stack:
        urls = {}
        for model, count in zip(models, (2, 1), strict=True):
            folder: Path = tmp_path_factory.mktemp(model)
            arguments = ("--speed", "20", "--model", model, "--served-name", model)
            sims = stack.enter_context(running_replicas(folder, count, arguments))
            urls |= {f"{model}-{sim.id}": sim.url for sim in sims}
        yield stack.enter_context(running_gateways(urls, gateways=2, config=CONFIG, redis_url=nodes.url))


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_keepalive_connections=None)) as http:
        yield http


async def served(load: Load, state: str, requests: int = 20) -> None:
    """Wait until the load has had this many more answers that were placed in this state."""
    before = load.states[state]
    await eventually(lambda: load.states[state] >= before + requests)


async def test_a_slot_moves_under_load_and_no_request_fails(
    nodes: RedisCluster, cluster: Cluster, models: list[str], http: httpx.AsyncClient
) -> None:
    """The slot's pool falls back meanwhile, the other pool does not. Afterwards the map has all its earlier entries."""
    moved, kept = models
    urls, text = cluster.gateway_urls, prose("known before")
    first = await ask(http, urls[0], text, model=moved)
    async with (
        running_load(Load(http, urls, model=moved), clients=3) as moving,
        running_load(Load(http, urls, model=kept), clients=3) as staying,
    ):
        await served(moving, "exact")
        with nodes.moving(PoolKeys(moved).anchor, to=nodes.nodes[2]):
            await served(moving, "fallback")
            others = staying.states["fallback"]
            await served(staying, "exact")
        await served(moving, "exact")
    assert moving.failures == staying.failures == []
    assert others == staying.states["fallback"] == 0
    await eventually(lambda: is_placed_exactly(http, urls[1], moved))
    again = await ask(http, urls[1], text, model=moved)
    assert again.headers["x-kvgate-decision"].startswith("hit")
    assert again.headers["x-kvgate-replica"] == first.headers["x-kvgate-replica"]
    for model in models:
        await eventually(lambda model=model: is_given_back(nodes, model))


async def is_placed_exactly(http: httpx.AsyncClient, url: str, model: str) -> bool:
    """Each gateway finds the slot's new node for itself, so one may fall back a little longer than the other."""
    answer = await ask(http, url, prose("elsewhere"), model=model)
    return "state=exact" in answer.headers["x-kvgate-decision"]


async def is_given_back(nodes: RedisCluster, pool: str) -> bool:
    node = nodes.owner(PoolKeys(pool).anchor)
    async with redis.Redis(port=node.port, decode_responses=True, protocol=2) as client:
        sums = await Ledger(client, pool).sums()
    assert not sums.problems(), sums.problems()
    return sums.are_zero
