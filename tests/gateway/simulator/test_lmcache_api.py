"""LMCache's HTTP routes on a simulated replica. An agent and `kvgate doctor` read them as they read a real server's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.engine.lmcache_server import parse_speeds, parse_tier
from coordinator.lmcache_chunks import ChunkTier
from gateway.simulator.settings import SimLmcacheSettings
from tests.gateway.simulator.conftest import RunningReplica, StartReplica
from tests.gateway.simulator.test_lmcache import complete, forget_gpu, stored
from tests.redis_server import RedisServer, running_redis

CHUNK = 8
REPLICA = {"block_size": 4, "num_gpu_blocks": 16, "model": "a/model"}
SPEED = 1000.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as started:
        yield started


async def tier_of(replica: RunningReplica, model: str = "a/model") -> ChunkTier | None:
    return parse_tier(await replica.get("/lmcache/status"), await replica.get("/lmcache/config"), model)


async def speeds_of(replica: RunningReplica) -> dict[str, float]:
    async with replica.http.get("/lmcache/metrics") as response:
        assert response.status == 200
        return parse_speeds(await response.text())


async def test_it_says_how_its_chunks_are_kept_in_redis(start_replica: StartReplica, server: RedisServer) -> None:
    told = SimLmcacheSettings(redis_url=server.url, chunk_tokens=CHUNK, key_prefix="mine", ttl_s=60)
    replica = await start_replica(**REPLICA, lmcache=told)
    assert await tier_of(replica) == ChunkTier("mine", "a/model", CHUNK, 1, 60)
    assert await tier_of(replica, "another/model") is None
    (adapter,) = (await replica.get("/lmcache/status"))["storage_manager"]["l2_adapters"]
    assert adapter["startup_nodes"] == [{"host": "127.0.0.1", "port": server.port}]


async def test_its_speeds_are_those_of_the_loads_that_were_made(
    start_replica: StartReplica, server: RedisServer
) -> None:
    told = SimLmcacheSettings(redis_url=server.url, chunk_tokens=CHUNK, redis_read_bytes_per_s=1e6, redis_chunk_s=0)
    replica = await start_replica(**REPLICA, lmcache=told, speed=SPEED)
    prompt = list(range(1, 3 * CHUNK + 2))
    await complete(replica, prompt)
    await stored(server, 3)
    assert await speeds_of(replica) == {}
    await forget_gpu(replica)
    assert await complete(replica, prompt) == 3 * CHUNK
    speeds = await speeds_of(replica)
    assert speeds["l1_load_bytes_per_s"] == pytest.approx(told.load_bytes_per_s * SPEED)
    assert 0 < speeds["l2_load_bytes_per_s"] < 1.01 * 1e6 * SPEED
