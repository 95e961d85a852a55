"""One healthy cluster of three gateways and three replicas, for tests that do not change it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, running_cluster
from tests.api.stage import PATIENT_REDIS
from tests.cluster.ledger import Ledger
from tests.forked import constants
from tests.redis_server import RedisServer, running_redis

# One token of an answer takes 20 ms: a stream of 4 000 tokens stays open longer than a test.
REPLICA_ARGUMENTS = ("--speed", "5", "--decode-s-per-token", "0.1")
CONFIG = {
    "hedge": {"max_share": 0},  # each test says which replica is slow, and where its requests go
    "redis": PATIENT_REDIS,
    "policy": {"allow_header": True},
    "health": {"timeout_s": 5},
}


@pytest.fixture(scope="package", autouse=True)
def quick() -> Iterator[None]:
    """Gateways notice changes soon."""
    quick = {
        "gateway.records.file_keys._LOOK_S": 0.5,
        "gateway.reload._LOOK_S": 0.2,
        "gateway.replicas.health_checks.INTERVAL_S": 0.25,
    }
    with constants(quick):
        yield


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with running_cluster(gateways=3, replicas=3, replica_arguments=REPLICA_ARGUMENTS, config=CONFIG) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A Redis of the file's own."""
    with running_redis() as server:
        yield server


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_keepalive_connections=None)) as client:
        yield client


@pytest.fixture
async def ledger(cluster: Cluster) -> AsyncIterator[Ledger]:
    async with redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as client:
        yield Ledger(client, cluster.pool)
