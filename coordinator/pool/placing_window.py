"""Bounds the placements of one gateway and pool that Redis has not answered."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from coordinator.errors import StoreLate
from coordinator.redis.time_limit import TimeLimits, fail
from coordinator.redis.wire import has_result

MOST = 64
_STEP = 0.5


class PlacingWindow:
    """At most `limit` placements are sent and unanswered, whether their callers still wait or not. Others wait here, in
    order.

    The limit follows what Redis can take, as a TCP sender's congestion window does. It grows with each placement that
    Redis began soon, shrinks with each one that waited in Redis for long, and is halved if one is late. Otherwise many
    gateways together keep a queue in Redis in which every placement is late.
    """

    def __init__(self, shrink_every_s: float) -> None:
        self.limit = float(MOST)
        self.taken = 0
        self._shrink_every_s = shrink_every_s
        self._shrunk_at_s = 0.0
        self._limits = TimeLimits()
        self._waiting: OrderedDict[asyncio.Future[None], float] = OrderedDict()
        """Who waits, and until when."""

    def __repr__(self) -> str:
        return f"<PlacingWindow {self.taken} of {int(self.limit)} taken, {len(self._waiting)} waiting>"

    def take(self) -> bool:
        """Take a place if one is free and nobody waits for it."""
        if self.taken >= int(self.limit) or self._waiting:
            return False
        self.taken += 1
        return True

    def join(self) -> None:
        """Count a placement that another pool's window has let pass."""
        self.taken += 1

    async def wait(self, limit_s: float, until_s: float) -> None:
        """Wait for a place and take it. Raises StoreLate if none is free within `limit_s` of Redis' time, or by
        `until_s`: see TimeLimits."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = until_s
        self._limits.watch(turn, limit_s, until_s, f"{self.taken} placements before it are unanswered")
        try:
            await turn
        except asyncio.CancelledError:
            if has_result(turn):  # cancelled in the turn of the loop in which it got the place
                self.give_back()
            raise
        finally:
            self._waiting.pop(turn, None)

    def give_back(self) -> None:
        """The placement was answered, or was not sent after all."""
        self.taken -= 1
        self._wake()

    def was_answered(self, had_queued: bool) -> None:
        """A placement was in time. `had_queued`: it had waited in Redis for longer than it should."""
        self.limit = max(1.0, self.limit - _STEP) if had_queued else min(float(MOST), self.limit + _STEP)

    def was_late(self, error: StoreLate) -> None:
        """Placements that Redis is late with together shrink the window once."""
        now_s = time.monotonic()
        if error.cause == "redis" and now_s - self._shrunk_at_s >= self._shrink_every_s:
            self._shrunk_at_s = now_s
            self.limit = max(1.0, self.limit / 2)

    def _wake(self) -> None:
        while self._waiting and self.taken < int(self.limit):
            turn, until_s = self._waiting.popitem(last=False)
            if turn.done():
                continue
            if until_s < time.monotonic():  # a busy event loop has not come to its timer yet
                fail(turn, StoreLate("this process was too busy to ask Redis in time", "gateway"))
            else:
                self.taken += 1
                turn.set_result(None)
