"""Time limits for requests: hundreds of them share one timer.

`asyncio.timeout` creates and cancels a timer of the event loop for each limit. These limits are seconds to minutes
long, so checking all of them every TICK_S is exact enough.
"""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType
from typing import Protocol

TICK_S = 0.05


class Due(Protocol):
    """Something with a deadline."""

    due_s: float
    """In terms of time.monotonic(). It may change."""

    def expire(self) -> None:
        """Called at each tick after `due_s`, until this is removed or `due_s` moves."""
        ...


class Deadlines:
    """`with deadlines.within(seconds, task): await …`, in that task, raises TimeoutError when it takes longer."""

    def __init__(self) -> None:
        self._running: set[Due] = set()
        self._timer: asyncio.TimerHandle | None = None

    def within(self, limit_s: float | None, task: asyncio.Task[None]) -> Limit:
        """A limit of `limit_s` seconds; None means no limit."""
        return Limit(self, limit_s, task)

    def add(self, limit: Due) -> None:
        self._running.add(limit)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now_s = time.monotonic()
        for limit in [limit for limit in self._running if limit.due_s <= now_s]:
            limit.expire()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self._running else None

    def remove(self, limit: Due) -> None:
        self._running.discard(limit)


class Limit:
    """One limit of the task that enters it."""

    __slots__ = ("_deadlines", "_has_expired", "_limit_s", "_task", "due_s")

    def __init__(self, deadlines: Deadlines, limit_s: float | None, task: asyncio.Task[None]) -> None:
        self._deadlines = deadlines
        self._task = task
        self._limit_s = limit_s
        self._has_expired = False
        self.due_s = 0.0

    def __enter__(self) -> Limit:
        if self._limit_s is not None:
            self.due_s = time.monotonic() + self._limit_s
            self._deadlines.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.remove(self)
        if self._has_expired and self._task.uncancel() <= 0 and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def pause(self) -> None:
        """It waits for something else, until `restart`."""
        self.due_s = math.inf

    def restart(self) -> None:
        """Its whole time begins now."""
        if self._limit_s is not None:
            self.due_s = time.monotonic() + self._limit_s

    def expire(self) -> None:
        """Cancel the task; only the first call does."""
        self._deadlines.remove(self)
        if not self._has_expired:
            self._has_expired = True
            self._task.cancel()
