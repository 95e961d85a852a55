"""An agent registers its replica, with one registration over all lives of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import redis.asyncio as redis

from coordinator.agent.agent_store import IdTaken, Registration
from coordinator.agent.http_engine import EngineSnapshot
from coordinator.agent.residency import Reset
from coordinator.keys import PoolKeys
from tests.coordinator.stream import VITALS
from tests.redis_server import RedisServer, running_redis

KEYS = PoolKeys("m")
EARLIER = EngineSnapshot(pool="m", url="http://r0.test:8000", started="18bcfe56800", capacity_tokens=1600)
LATER = replace(EARLIER, started="18bcfe56900")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.Redis]:
    async with redis.Redis.from_url(server.url, decode_responses=True, protocol=2) as client:
        yield client


async def tell(registration: Registration, engine: EngineSnapshot) -> None:
    """Follows the engine for a heartbeat, publishes something, and leaves."""
    store = await registration.open(engine)
    await store.attend(VITALS)
    await store.publish([Reset()], 0.0, 1)
    await store.attend(VITALS, leaving=True)
    await store.close()


async def test_an_engine_that_comes_back_after_its_successor_is_another_engine(
    server: RedisServer, client: redis.Redis
) -> None:
    registration = Registration(server.url, "r0", "agent0")
    await tell(registration, EARLIER)
    earlier = await client.hget(KEYS.replicas, "r0")
    await tell(registration, LATER)
    await client.hset(KEYS.replicas, "r0", earlier)
    with pytest.raises(IdTaken, match="another engine lives under this id"):
        await registration.open(LATER)


async def test_a_store_that_comes_back_as_it_was_in_the_engines_earlier_life_is_told_of_the_later_one(
    server: RedisServer, client: redis.Redis
) -> None:
    """The agent keeps what it knows: to begin anew, it would need chains that the store has lost."""
    registration = Registration(server.url, "r0", "agent0")
    await tell(registration, EARLIER)
    keys = [KEYS.replicas, KEYS.agents, KEYS.entries, KEYS.events("r0")]
    before = {key: await client.dump(key) for key in keys}
    await tell(registration, LATER)
    for key, dumped in before.items():
        await client.restore(key, 0, dumped, replace=True)
    store = await registration.open(LATER)
    assert (await client.hget(KEYS.replicas, "r0")).startswith(f"{LATER.started} ")
    await store.close()


async def test_an_engine_of_which_nothing_was_said_is_no_reason_to_believe_that_the_store_went_back(
    server: RedisServer, client: redis.Redis
) -> None:
    registration = Registration(server.url, "r0", "agent0")
    records = []
    for engine in (EARLIER, LATER):
        store = await registration.open(engine)
        await store.attend(VITALS, leaving=True)
        await store.close()
        records.append(await client.hget(KEYS.replicas, "r0"))
    await client.hset(KEYS.replicas, "r0", records[0])
    with pytest.raises(IdTaken):
        await registration.open(LATER)
