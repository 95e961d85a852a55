"""LMCache's HTTP routes on a simulated replica. An agent and `kvgate doctor` read them as they read a real server's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.engine.lmcache_server import parse_tier
from coordinator.lmcache_chunks import ChunkTier
from gateway.simulator.settings import SimLmcacheSettings
from tests.gateway.simulator.conftest import RunningReplica, StartReplica
from tests.redis_server import RedisServer, running_redis

CHUNK = 8
REPLICA = {"block_size": 4, "num_gpu_blocks": 16, "model": "a/model"}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as started:
        yield started


async def tier_of(replica: RunningReplica, model: str = "a/model") -> ChunkTier | None:
    return parse_tier(await replica.get("/lmcache/status"), await replica.get("/lmcache/config"), model)


async def test_it_says_how_its_chunks_are_kept_in_redis(start_replica: StartReplica, server: RedisServer) -> None:
    told = SimLmcacheSettings(redis_url=server.url, chunk_tokens=CHUNK, key_prefix="mine", ttl_s=60)
    replica = await start_replica(**REPLICA, lmcache=told)
    assert await tier_of(replica) == ChunkTier("mine", "a/model", CHUNK, 1, 60)
    assert await tier_of(replica, "another/model") is None
    (adapter,) = (await replica.get("/lmcache/status"))["storage_manager"]["l2_adapters"]
    assert adapter["startup_nodes"] == [{"host": "127.0.0.1", "port": server.port}]
