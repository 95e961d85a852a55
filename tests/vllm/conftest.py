"""One cluster for all tests of this folder: two real engines, each with a cache of 16 000 tokens, and two gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from bench.vllm.replicas import VllmCluster, running_cluster
from tests.vllm.clients import Client

BLOCKS = 768
# The engines keep both cores busy: a placement may take longer than production's limit of 20 ms.
CONFIG = {
    "redis": {"budget_ms": 500},
    "policy": {"allow_header": True},
    "health": {"timeout_s": 5},
}


@pytest.fixture(scope="package")
def cluster() -> Iterator[VllmCluster]:
    with running_cluster(replicas=2, gateways=2, blocks=BLOCKS, config=CONFIG) as cluster:
        yield cluster


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_keepalive_connections=None)) as client:
        yield client


@pytest.fixture
def gateways(http: httpx.AsyncClient, cluster: VllmCluster) -> list[Client]:
    return [Client(http, url) for url in cluster.gateway_urls]
