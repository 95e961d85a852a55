"""A gateway on a Redis whose clock a test can step, and replicas that were registered a day ago."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from bench.faults import stepped_clock
from coordinator import scripts
from coordinator.pool.pool import Pool
from tests.coordinator.clock.stage import HOUR_MS, Clock
from tests.coordinator.stage import joined, register
from tests.redis_server import RedisServer


@pytest.fixture
async def clock(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clock]:
    monkeypatch.setattr(scripts, "source", stepped_clock.stepped)
    scripts.load.cache_clear()
    yield Clock(client)
    scripts.load.cache_clear()
    await client.delete(stepped_clock.OFFSET_KEY)


@pytest.fixture
async def pool(clock: Clock, redis_server: RedisServer) -> AsyncIterator[Pool]:
    """The pool of gw0, after its first heartbeat."""
    async with joined(redis_server.url, "gw0") as pool:
        await clock.step(-24 * HOUR_MS)
        await register(pool, 2)
        await clock.step(24 * HOUR_MS)
        await pool.beat()
        yield pool


@pytest.fixture
async def other(pool: Pool, redis_server: RedisServer) -> AsyncIterator[Pool]:
    async with joined(redis_server.url, "gw1") as other:
        await other.beat()
        yield other
