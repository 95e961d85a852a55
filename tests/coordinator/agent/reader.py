"""A reader that reads a feed in the background."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

from coordinator.agent.batch_sequence import Item
from coordinator.agent.feed import Feed
from gateway.tasks import Tasks
from tests.polling import eventually

SOON_S = 0.05
LONG_S = 600.0
PATIENT_S = 1.0
"""A time limit for replays: longer than any replay here, and short enough to wait for."""


class Reader:
    """Reads a feed into a list."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.items: list[Item] = []
        self._tasks = Tasks()
        self._tasks.spawn(self._read(), "reader")

    async def _read(self) -> None:
        async with aclosing(self.feed.items()) as items:
            async for item in items:
                self.items.append(item)

    async def reads(self, expected: list[Item]) -> None:
        await eventually(lambda: len(self.items) >= len(expected))
        assert self.items == expected

    async def close(self) -> None:
        await self._tasks.close()


Read = Callable[..., Reader]
"""The fixture `read`."""
