"""The Redis of a simulated LMCache. Redis really holds the chunks' names; transfer times are simulated by a rate.

If Redis fails, answers do not: no chunk is found or kept until Redis is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.errors import StoreError
from coordinator.redis.wire import Wire
from gateway.simulator.settings import SimLmcacheSettings
from gateway.tasks import Tasks

_CONNECT_S = 1.0
_BUDGET_S = 2.0
"""The limit for all of one prompt's commands together, like `lmcache.redis.max_stall_s` in a replica's file."""


class ChunkRedis:
    """One LMCache server's access to Redis. Transfers in one direction take place one after another."""

    def __init__(self, settings: SimLmcacheSettings, speed: float, loaded: Callable[[int, float], None]) -> None:
        """`loaded` is called with the bytes and seconds of each fetch."""
        assert settings.redis_url is not None
        self._url = settings.redis_url
        self._settings = settings
        self._speed = speed
        self._loaded = loaded
        self._reading, self._writing, self._connecting = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._tasks = Tasks()
        self._wire: Wire | None = None

    def __repr__(self) -> str:
        return f"<ChunkRedis {'connected' if self._wire else 'not connected'}>"

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()
        await self._tasks.close()

    async def fetch(self, names: Sequence[str]) -> int:
        """Fetches these chunks up to the first one that is missing. Returns their number."""
        there = _leading(await self._ask([("EXISTS", name) for name in names]))
        if not there:
            return 0
        settings, loop = self._settings, asyncio.get_running_loop()
        began_s = loop.time()
        chunk_s = settings.redis_chunk_s + settings.chunk_kv_bytes / settings.redis_read_bytes_per_s
        await self._transfer(self._reading, there * chunk_s)
        fetched = _leading(await self._ask([("GET", name) for name in names[:there]]))
        self._loaded(there * settings.chunk_kv_bytes, loop.time() - began_s)
        return fetched

    def put(self, names: Sequence[str]) -> None:
        """Store these chunks, in the background."""
        self._tasks.spawn(self._put(names), "chunks are stored")

    async def _put(self, names: Sequence[str]) -> None:
        settings = self._settings
        await self._transfer(self._writing, len(names) * settings.chunk_kv_bytes / settings.redis_write_bytes_per_s)
        value = bytes(settings.value_bytes)
        await self._ask([("SET", name, value, "EX", settings.ttl_s) for name in names])

    async def _transfer(self, direction: asyncio.Lock, seconds: float) -> None:
        """Wait for as long as a transfer takes that is requested now, in simulated seconds."""
        if self._speed > 0:
            async with direction:
                await asyncio.sleep(seconds / self._speed)

    async def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies; empty if Redis did not answer in time."""
        try:
            async with asyncio.timeout(_BUDGET_S):
                async with self._connecting:
                    wire = self._wire = self._wire or await Wire.open(self._url, _CONNECT_S, self._lose)
                return list(await asyncio.gather(*(wire.send(*command) for command in commands)))
        except (StoreError, TimeoutError):
            return []

    def _lose(self, _error: StoreError) -> None:
        """The next command opens another connection."""
        lost, self._wire = self._wire, None
        if lost is not None:
            self._tasks.spawn(lost.close(), "a lost connection is closed")


def _leading(replies: Sequence[Any]) -> int:
    """How many replies, from the first one on, report an existing key."""
    return next((at for at, reply in enumerate(replies) if not reply), len(replies))
