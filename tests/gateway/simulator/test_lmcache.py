"""Chunks of KV in CPU memory and in a real Redis, under LMCache's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from coordinator.lmcache_chunks import ChunkTier
from gateway.simulator.answers import text_answer
from gateway.simulator.engine import Generation, SimEngine
from gateway.simulator.prompt import PromptBuilder
from gateway.simulator.settings import SimLmcacheSettings, SimSettings
from gateway.simulator.sim_lmcache import SimLmcache
from tests.gateway.simulator.conftest import RunningReplica, StartReplica, cached_tokens_of
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

CHUNK = 8
_SMALL = {"block_size": 4, "num_gpu_blocks": 16, "model": "a/model"}
KV_BYTES = SimLmcacheSettings(cpu_gb=1, chunk_tokens=CHUNK).chunk_kv_bytes


def in_redis(server: RedisServer, **more: Any) -> SimLmcacheSettings:
    return SimLmcacheSettings(redis_url=server.url, chunk_tokens=CHUNK, **more)


def in_cpu(chunks: int) -> SimLmcacheSettings:
    return SimLmcacheSettings(cpu_gb=chunks * KV_BYTES / 1e9, chunk_tokens=CHUNK)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as started:
        yield started


async def complete(replica: RunningReplica, prompt: list[int], **body: Any) -> int:
    """The number of the prompt's cached tokens."""
    status, answer = await replica.post("/v1/completions", {"model": "sim", "prompt": prompt, "max_tokens": 1, **body})
    assert status == 200, answer
    return cached_tokens_of(answer)


async def forget_gpu(replica: RunningReplica, query: str = "") -> None:
    assert (await replica.post(f"/reset_prefix_cache{query}", {}))[1]["reset"]


async def stored(server: RedisServer, count: int) -> list[str]:
    """The keys in Redis, once there are at least `count`."""
    with redis.Redis(port=server.port) as client:

        def found() -> list[str]:
            return sorted({key.decode() for key in client.scan_iter()})  # SCAN may return one twice

        await eventually(lambda: len(found()) >= count)
        return found()


async def test_what_is_in_redis_has_the_names_that_its_tokens_give_and_a_ttl(
    start_replica: StartReplica, server: RedisServer
) -> None:
    replica = await start_replica(**_SMALL, lmcache=in_redis(server, value_bytes=100, ttl_s=60))
    prompt = list(range(1, 3 * CHUNK))
    await complete(replica, prompt, max_tokens=12)
    await complete(replica, prompt, cache_salt="tenant")
    tier = ChunkTier("kvchunk", "a/model", CHUNK)
    hashes = tier.hashes(prompt)
    keys = [tier.name(each, salt) for salt in ("", "tenant") for each in hashes]
    assert await stored(server, 4) == sorted(keys)
    with redis.Redis(port=server.port) as client:
        assert {client.strlen(key) for key in keys} == {100}
        assert all(0 < client.ttl(key) <= 60 for key in keys)


async def test_another_replica_loads_what_one_has_computed_up_to_the_first_gap(
    start_replica: StartReplica, server: RedisServer
) -> None:
    first, second = [await start_replica(**_SMALL, lmcache=in_redis(server)) for _ in range(2)]
    prompt = list(range(1, 3 * CHUNK + 2))
    assert await complete(first, prompt) == 0
    await stored(server, 3)
    assert await complete(second, prompt) == 3 * CHUNK
    assert (await second.state())["lmcache"]["fetched_bytes"] == 3 * KV_BYTES
    tier = ChunkTier("kvchunk", "a/model", CHUNK)
    hashes = tier.hashes(prompt)
    with redis.Redis(port=server.port) as client:
        client.delete(tier.name(hashes[1]))
    await forget_gpu(second)
    assert await complete(second, prompt) == CHUNK
    assert await stored(server, 3)


async def test_without_cpu_memory_what_the_gpu_has_is_fetched_all_the_same(
    start_replica: StartReplica, server: RedisServer
) -> None:
    replica = await start_replica(**_SMALL, lmcache=in_redis(server))
    prompt = list(range(1, 3 * CHUNK + 2))
    await complete(replica, prompt)
    await stored(server, 3)
    assert await complete(replica, prompt) == 3 * CHUNK
    told = (await replica.state())["lmcache"]
    assert (told["fetched_bytes"], told["sent_bytes"]) == (3 * KV_BYTES, 3 * KV_BYTES)


async def test_what_cpu_memory_keeps_is_fetched_and_sent_once(start_replica: StartReplica, server: RedisServer) -> None:
    replica = await start_replica(**_SMALL, lmcache=in_redis(server, cpu_gb=1))
    prompt = list(range(1, 3 * CHUNK + 2))
    await complete(replica, prompt)
    await stored(server, 3)
    await forget_gpu(replica, "?reset_external=true")
    for _ in range(2):
        assert await complete(replica, prompt) == 3 * CHUNK
    told = (await replica.state())["lmcache"]
    assert (told["fetched_bytes"], told["sent_bytes"], told["held_bytes"]) == (3 * KV_BYTES,) * 3


async def test_cpu_memory_drops_what_was_used_least_recently_deepest_first(start_replica: StartReplica) -> None:
    replica = await start_replica(**_SMALL, lmcache=in_cpu(3))
    old, new = list(range(1, 2 * CHUNK + 2)), list(range(100, 100 + 2 * CHUNK))
    await complete(replica, old)
    await complete(replica, new)
    await forget_gpu(replica)
    assert await complete(replica, old) == CHUNK
    assert (await replica.state())["lmcache"]["held_bytes"] == 3 * KV_BYTES


async def test_a_prompt_whose_chunks_are_being_fetched_does_not_hold_up_those_behind_it(server: RedisServer) -> None:
    settings = SimSettings(block_size=4, num_gpu_blocks=64, speed=0, lmcache=in_redis(server))
    assert settings.lmcache is not None
    lmcache = SimLmcache(settings.lmcache, "m", 0)
    engine = SimEngine(settings, lambda _: None, lmcache=lmcache)
    first, second = submit(engine, "a", CHUNK), submit(engine, "b", 2)  # the second has no full chunk
    assert engine.schedule()[1] == 2
    assert list(engine.waiting) == first.sequences
    assert engine.running == second.sequences
    await eventually(lambda: engine.schedule() and first.sequences[0] in engine.running)
    await lmcache.close()


def submit(engine: SimEngine, name: str, tokens: int) -> Generation:
    builder = PromptBuilder()
    builder.text(name * 4 * tokens)
    prompt = builder.build()
    generation = Generation(engine, [prompt], [text_answer(prompt, 1)])
    generation.start()
    return generation
