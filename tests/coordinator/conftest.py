"""Every coordinator test runs on each version of Redis, and leaves no key that the data model does not list."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio as redis

import coordinator
from coordinator.pool.pool import Pool
from tests.coordinator.stage import joined, register
from tests.coordinator.stream import Stream, attend, linked
from tests.redis_server import EACH_REDIS, RedisServer, running_redis, server_named

README = Path(coordinator.__file__).with_name("README.md")
MORTAL = (":response:", ":measured:", ":chunk:")
"""Keys that must have a TTL."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A plain `pytest` does not collect thousands of tests for versions of Redis that it skips."""
    if "redis_version" in metafunc.fixturenames:
        left_out = "not older_redis" in metafunc.config.option.markexpr
        metafunc.parametrize("redis_version", EACH_REDIS[:1] if left_out else EACH_REDIS, scope="session")


@pytest.fixture(scope="session")
def redis_server(redis_version: str) -> Iterator[RedisServer]:
    with running_redis(server_named(redis_version)) as server:
        yield server


@functools.cache
def documented_patterns() -> list[re.Pattern[str]]:
    """The key patterns of the data model's table, such as `kvgate:{m}:own:<key>`."""
    names = re.findall(r"^\| `(kvgate:[^`]+)`", README.read_text(), flags=re.MULTILINE)
    patterns = (re.escape(name).replace(r"\{m\}", r"\{[a-z0-9._-]{1,64}\}") for name in names)
    return [re.compile(re.sub(r"<\w+>", ".+", pattern)) for pattern in patterns]


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.Redis]:
    client = redis.Redis.from_url(redis_server.url, decode_responses=True, protocol=2)
    yield client
    patterns = documented_patterns()
    keys = [key async for key in client.scan_iter("*")]
    unknown = [key for key in keys if not any(pattern.fullmatch(key) for pattern in patterns)]
    immortal = [key for key in keys if any(part in key for part in MORTAL) and await client.ttl(key) < 0]
    if keys:
        await client.delete(*keys)
    await client.aclose()
    assert not unknown, f"keys that coordinator/README.md does not list: {unknown}"
    assert not immortal, f"keys that should expire: {immortal}"


@pytest.fixture
async def pool(redis_server: RedisServer, client: redis.Redis) -> AsyncIterator[Pool]:
    """The pool `m` of a gateway that has joined."""
    async with joined(redis_server.url, "gw0") as pool:
        yield pool


@pytest.fixture
async def stream(redis_server: RedisServer, pool: Pool, client: redis.Redis) -> AsyncIterator[Stream]:
    """The event stream of r0, which has an agent; gw0 holds the lease on the stream. The replica r1 has no agent."""
    await register(pool, 2)
    async with linked(redis_server.url) as link:
        await attend(link)
        yield Stream(link)
