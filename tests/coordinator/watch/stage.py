"""A test's own Redis, which may be filled; chunks with LMCache's names; and watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import redis.asyncio as redis

from coordinator.watch import watch_session
from coordinator.watch.watch_session import Report
from coordinator.watch.watcher import Watcher
from tests.redis_server import RedisServer, running_redis

MIB = 2**20
CHUNK_TTL_S = 3600
EVENTS = ("--notify-keyspace-events", "E$e")


def chunk(number: int) -> str:
    return f"kvchunk@Qwen/Qwen2.5-7B-Instruct@01000100@0@{number:064x}"


@dataclass
class Shared:
    """A Redis of any version, and a client with all rights."""

    server: RedisServer
    client: redis.Redis
    version: int

    async def store(self, number: int, size_bytes: int = 1000, ttl_s: int | None = None) -> str:
        """Stores a chunk as LMCache does."""
        await self.client.set(chunk(number), bytes(size_bytes), ex=ttl_s)
        return chunk(number)


@asynccontextmanager
async def shared_redis(binary: str, *options: str) -> AsyncIterator[Shared]:
    with running_redis(binary, options) as server:
        async with redis.Redis.from_url(server.url, decode_responses=True, protocol=2) as client:
            info = await client.info("server")
            yield Shared(server, client, int(info["redis_version"].split(".")[0]))


@asynccontextmanager
async def watching(url: str, who: str = "gw0") -> AsyncIterator[Watcher]:
    """A watcher that runs until the end of the block, and then releases its lease."""
    watcher = Watcher(url, who, CHUNK_TTL_S)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch_session, "SAMPLES_PER_S", 200)
        patched.setattr(watch_session, "INFO_EVERY_S", 0.2)
        task = asyncio.ensure_future(watcher.run())
        try:
            yield watcher
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def report_of(watcher: Watcher) -> Report:
    assert watcher.report is not None
    return watcher.report


def holds(watcher: Watcher, condition: str) -> bool:
    return watcher.report is not None and condition in watcher.report.conditions
