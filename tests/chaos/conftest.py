"""Two clusters for all chaos tests, each with two gateways, three replicas and its own Redis: `stage` without KV
events, `truth` with an agent for each replica and small caches. The fixtures heal a cluster before each test.

When a test is over, all load must be given back. The fixtures check this after every test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import running_cluster
from tests.chaos import truth_stage
from tests.chaos.stage import CONFIG, REPLICA_ARGUMENTS, Stage
from tests.chaos.truth_stage import TruthStage
from tests.cluster.ledger import Ledger
from tests.forked import GLASS_REPLICA, constants
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis


@pytest.fixture(scope="package", autouse=True)
def quick() -> Iterator[None]:
    """Gateways find faults soon, breakers let probes through soon, and no retry budget reacts to what tests break. On a
    busy machine, a gateway may hear late that an engine works."""
    quick = {
        "coordinator.breaker.OPEN_MS": 1000,
        "gateway.relay.retry_budget.MIN_RETRIES": 1000,
        "gateway.replicas.health_checks.INTERVAL_S": 0.25,
        "gateway.replicas.hangs._LATELY_S": 3.5,
        "gateway.upstream.origin.CONNECT_S": 1,
    }
    with constants(quick):
        yield


@pytest.fixture(scope="package")
def chaos_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="package")
def chaos_cluster(chaos_redis: RedisServer) -> Iterator[Stage]:
    with running_cluster(
        gateways=2,
        replicas=3,
        replica_arguments=REPLICA_ARGUMENTS,
        events=False,
        config=CONFIG,
        redis_url=chaos_redis.url,
    ) as cluster:
        yield Stage(cluster, chaos_redis)


@pytest.fixture(scope="package")
def truth_cluster() -> Iterator[TruthStage]:
    with (
        running_redis(options=truth_stage.REDIS_OPTIONS) as server,
        running_cluster(
            gateways=2,
            replicas=3,
            replica_arguments=truth_stage.REPLICA_ARGUMENTS,
            replica_command=GLASS_REPLICA,
            config=truth_stage.CONFIG,
            redis_url=server.url,
        ) as cluster,
    ):
        yield TruthStage(cluster, server)


@pytest.fixture
async def stage(chaos_cluster: Stage) -> AsyncIterator[Stage]:
    stage = chaos_cluster
    async with (
        httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_keepalive_connections=None)) as http,
        redis.Redis.from_url(stage.redis.url, decode_responses=True, protocol=2) as client,
    ):
        stage.http, stage.ledger = http, Ledger(client, stage.cluster.pool)
        stage.heal_processes()
        await stage.healed()
        yield stage
        stage.heal_processes()
        await asyncio.gather(*(stage.clear_faults(replica) for replica in stage.cluster.replicas))
        await eventually(stage.all_load_is_given_back)


@pytest.fixture
async def truth(truth_cluster: TruthStage) -> AsyncIterator[TruthStage]:
    truth = truth_cluster
    async with (
        httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_keepalive_connections=None)) as http,
        redis.Redis.from_url(truth.redis.url, decode_responses=True, protocol=2) as client,
    ):
        truth.http, truth.client, truth.ledger = http, client, Ledger(client, truth.cluster.pool)
        await truth.heal()
        yield truth
        await truth.heal()
        await eventually(truth.all_load_is_given_back)
