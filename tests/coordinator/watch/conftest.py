"""Every test of the watch runs on each version of Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.coordinator.watch.stage import EVENTS, Shared, shared_redis
from tests.redis_server import EACH_REDIS, server_named


@pytest.fixture(params=EACH_REDIS)
def binary(request: pytest.FixtureRequest) -> str:
    return server_named(request.param)


@pytest.fixture
async def shared(binary: str) -> AsyncIterator[Shared]:
    """A Redis with room for 64 MiB that publishes events of writes and evictions."""
    options = (*EVENTS, "--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru")
    async with shared_redis(binary, *options) as shared:
        yield shared
