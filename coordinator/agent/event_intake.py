"""An engine's events as its agent takes them: in handfuls, and whether any reach it at all."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import structlog

from coordinator.agent.feed import Feed, Item

_log = structlog.get_logger("kvgate.agent")

_BATCH_S = 0.02
"""Events are gathered for so long before they are worked in."""
_QUEUE = 1000
_SILENCE_S = 15.0


class EventIntake:
    """The events of one engine, without a replay where `replay` is empty. `listen` as a task brings them."""

    def __init__(self, replica: str, events: str, replay: str) -> None:
        self._replica = replica
        self._events = events
        self._replay = replay
        self._items: asyncio.Queue[Item] = asyncio.Queue(_QUEUE)
        self._feed: Feed | None = None
        self._has_heard = False

    async def listen(self) -> None:
        """Without end; raises zmq.ZMQError for endpoints that nothing can connect to."""
        self._feed = Feed(self._events, self._replay or None)
        async with aclosing(self._feed.items()) as items:
            async for item in items:
                await self._items.put(item)

    async def collect(self, until_s: float) -> list[Item]:
        """What came, gathered for a moment; empty when nothing came until `until_s` (event loop time)."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(until_s):
                items = [await self._items.get()]
        except TimeoutError:
            return []
        await asyncio.sleep(min(_BATCH_S, max(0.0, until_s - loop.time())))
        while not self._items.empty():
            items.append(self._items.get_nowait())
        return items

    def hears(self) -> bool:
        """Whether events reach this agent: a quiet engine is asked for them every second, where it can be asked."""
        heard_s = self._feed.heard_s if self._feed is not None else None
        hears = not self._replay or (heard_s is not None and time.monotonic() - heard_s < _SILENCE_S)
        if hears != self._has_heard:
            self._has_heard = hears
            log = _log.info if hears else _log.warning
            log("events" if hears else "no events", replica=self._replica, endpoint=self._events)
        return hears
