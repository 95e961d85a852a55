"""The Redis of a simulated LMCache. Redis really holds the chunks' names; transfer times are simulated by a rate.

If Redis fails, answers do not: no chunk is found or kept until Redis is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from coordinator.errors import StoreError
from coordinator.redis.wire import Wire
from gateway.simulator.settings import SimLmcacheSettings
from gateway.simulator.throughput import Throughput
from gateway.tasks import Tasks

_CONNECT_S = 1.0
_BUDGET_S = 2.0
"""The limit for all of one prompt's commands together, like `lmcache.redis.max_stall_s` in a replica's file."""


class Lane:
    """Simulated transfers in a row: each begins when the one before it ends."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._free_at_s = 0.0

    async def take(self, seconds: float) -> None:
        """Wait until a transfer that is requested now has ended. It takes this many (simulated) seconds."""
        if self._speed <= 0:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + seconds / self._speed
        await asyncio.sleep(self._free_at_s - now_s)


class ChunkRedis:
    """One LMCache server's access to Redis."""

    def __init__(self, settings: SimLmcacheSettings, speed: float) -> None:
        assert settings.redis_url is not None
        self.loads = Throughput("l2_load", {"l2_name": "valkey"})
        self._url = settings.redis_url
        self._settings = settings
        self._reading, self._writing = Lane(speed), Lane(speed)
        self._tasks = Tasks()
        self._wire: Wire | None = None
        self._is_lost = False
        self._connecting = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ChunkRedis {'connected' if self._wire and not self._is_lost else 'not connected'}>"

    async def close(self) -> None:
        await self._tasks.close()
        if self._wire is not None:
            await self._wire.close()

    async def fetch(self, names: Sequence[str]) -> int:
        """Fetches these chunks up to the first one that is missing. Returns their number."""
        there = _leading(await self._ask([("EXISTS", name) for name in names]))
        if not there:
            return 0
        settings, loop = self._settings, asyncio.get_running_loop()
        began_s = loop.time()
        chunk_s = settings.redis_chunk_s + settings.chunk_kv_bytes / settings.redis_read_bytes_per_s
        await self._reading.take(there * chunk_s)
        fetched = _leading(await self._ask([("GET", name) for name in names[:there]]))
        self.loads.record(there * settings.chunk_kv_bytes, loop.time() - began_s)
        return fetched

    def put(self, names: Sequence[str]) -> None:
        """Store these chunks, in the background."""
        self._tasks.spawn(self._put(names), "chunks are stored")

    async def _put(self, names: Sequence[str]) -> None:
        settings = self._settings
        await self._writing.take(len(names) * settings.chunk_kv_bytes / settings.redis_write_bytes_per_s)
        value = bytes(settings.value_bytes)
        await self._ask([("SET", name, value, "EX", settings.ttl_s) for name in names])

    async def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies; empty if Redis did not answer in time."""
        try:
            async with asyncio.timeout(_BUDGET_S):
                wire = await self._connected()
                return list(await asyncio.gather(*(wire.send(*command) for command in commands)))
        except (StoreError, TimeoutError):
            return []

    async def _connected(self) -> Wire:
        async with self._connecting:
            if self._wire is not None and self._is_lost:
                lost, self._wire = self._wire, None
                await lost.close()
            if self._wire is None:
                self._is_lost = False
                self._wire = await Wire.open(self._url, _CONNECT_S, self._lose)
            return self._wire

    def _lose(self, _error: StoreError) -> None:
        self._is_lost = True


def _leading(replies: Sequence[Any]) -> int:
    """How many replies, from the first one on, report an existing key."""
    return next((at for at, reply in enumerate(replies) if not reply), len(replies))
