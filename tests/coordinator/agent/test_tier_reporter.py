"""An agent reports LMCache's chunks to a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio as redis

from coordinator.agent.agent_store import AgentStore
from coordinator.agent.blocks import BlockTable
from coordinator.agent.residency import Resident
from coordinator.agent.tier_reporter import TierReporter
from coordinator.lmcache_chunks import ChunkTier
from tests.coordinator.agent.prompts import SIZE, stored
from tests.coordinator.stage import KEYS, chain
from tests.coordinator.stream import linked
from tests.redis_server import RedisServer, running_redis

CHUNKED = ChunkTier(prefix="kv", model="model", chunk_tokens=SIZE, world_size=1, ttl_s=60)
TOKENS = list(range(SIZE))
NAME = ChunkTier("kv", "model", SIZE).name(ChunkTier("kv", "model", SIZE).hashes(TOKENS)[0])
KEY = chain(1)[0]
COMPUTED = {"prefills": 1.0, "prefill_computed_tokens": 1000.0, "prefill_s": 1.0}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.Redis]:
    async with redis.Redis.from_url(server.url, decode_responses=True, protocol=2) as client:
        yield client
        await client.flushall()


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[AgentStore]:
    async with linked(server.url) as store:
        yield store


def following(**counters: float) -> TierReporter:
    """The reporter of an engine that has stored one block, which completes one key."""
    table = BlockTable()
    tiers = TierReporter("r0", table)
    tiers.observe(CHUNKED, dict.fromkeys(COMPUTED, 0.0))
    tiers.observe(CHUNKED, COMPUTED | counters)
    event = stored([1], tokens=TOKENS)
    table.store(event)
    tiers.apply([event])
    tiers.note([Resident(KEY, SIZE, SIZE, "gpu", 1)])
    return tiers


async def told(client: redis.Redis) -> str | None:
    said: str | None = await client.hget(KEYS.tiers, "r0")
    return said


async def test_what_a_keys_chunk_is_called_is_said_for_as_long_as_chunks_live(
    store: AgentStore, client: redis.Redis
) -> None:
    await following().publish(store)
    assert await client.get(KEYS.chunk(KEY)) == f"{SIZE} {NAME}"
    assert 0 < await client.ttl(KEYS.chunk(KEY)) <= CHUNKED.ttl_s


async def test_until_something_was_loaded_it_is_not_measured_what_that_saves(
    store: AgentStore, client: redis.Redis
) -> None:
    await following().report(store)
    assert await told(client) == "- ?"


async def test_what_loading_saves_is_said_once_it_is_measured_and_again_when_it_changes(
    store: AgentStore, client: redis.Redis
) -> None:
    tiers = following()
    await client.set(NAME, "x" * 4000)  # 1 000 bytes per token
    await tiers.report(store)
    tiers.observe(CHUNKED, COMPUTED | {"l2_load_bytes_per_s": 4e6, "l1_load_bytes_per_s": 1e7})
    await tiers.report(store)
    assert await told(client) == "0.9 0.75"
    await client.hdel(KEYS.tiers, "r0")
    tiers.observe(CHUNKED, COMPUTED | {"l2_load_bytes_per_s": 4.001e6, "l1_load_bytes_per_s": 1e7})
    await tiers.report(store)
    assert await told(client) is None
    tiers.observe(CHUNKED, COMPUTED | {"l2_load_bytes_per_s": 8e6, "l1_load_bytes_per_s": 1e7})
    await tiers.report(store)
    assert await told(client) == "0.9 0.875"


async def test_another_store_is_told_again(store: AgentStore, client: redis.Redis) -> None:
    tiers = following()
    await tiers.report(store)
    await client.flushall()
    tiers.forget()
    await tiers.report(store)
    assert await told(client) == "- ?"


async def test_of_chunks_that_the_agents_user_may_not_see_nothing_is_measured(
    server: RedisServer, client: redis.Redis
) -> None:
    await client.execute_command("ACL", "SETUSER", "agent", "on", ">secret", "~kvgate:*", "+@all")
    await client.set(NAME, "x" * 4000)
    tiers = following(l2_load_bytes_per_s=4e6)
    async with linked(server.url.replace("redis://", "redis://agent:secret@")) as store:
        await tiers.publish(store)
        await tiers.report(store)
    assert await told(client) == "- ?"


async def test_an_engine_without_lmcache_says_what_it_loads_from_its_cpu_memory(
    store: AgentStore, client: redis.Redis
) -> None:
    tiers = TierReporter("r0", BlockTable())
    tiers.observe(None, dict.fromkeys((*COMPUTED, "cpu_load_s", "cpu_loaded_tokens"), 0.0))
    tiers.observe(None, COMPUTED | {"cpu_load_s": 0.1, "cpu_loaded_tokens": 1000.0})
    await tiers.report(store)
    assert await told(client) == "0.9 -"


async def test_a_redis_that_is_full_and_refuses_names_does_not_cost_the_agent_its_connection(
    store: AgentStore, client: redis.Redis
) -> None:
    tiers = following()
    await client.config_set("maxmemory", 1)
    try:
        await tiers.publish(store)
        await tiers.report(store)
    finally:
        await client.config_set("maxmemory", 0)
    assert (await told(client), await client.get(KEYS.chunk(KEY))) == (None, None)
    assert await store.ask("PING") == b"PONG"
