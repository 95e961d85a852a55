"""A look at the cluster that all pages of a gateway share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson


class SharedLook:
    """Looks when somebody asks, and remembers what it saw for a while."""

    def __init__(self, look: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._look = look
        self._seen = b""
        self._seen_s = float("-inf")
        self._looking = asyncio.Lock()

    async def get(self, good_s: float) -> bytes:
        """What was seen, as JSON, if it is not older than `good_s`; else it looks again. It is the same object until
        then. Raises what the look raises."""
        async with self._looking:
            if time.monotonic() - self._seen_s >= good_s:
                self._seen = orjson.dumps(await self._look())
                self._seen_s = time.monotonic()
            return self._seen
