"""Waiting for a reply with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from coordinator.errors import StoreLate

IN_ALL = 3
"""A call may take so many of its budgets, if this process itself is slow."""
_STEPS = 4
_FADES = 0.99
_Reply = TypeVar("_Reply")


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Fail a future that nobody may await: its error counts as retrieved."""
    future.set_exception(error)
    future.exception()


class LoopLag:
    """How late the event loop of this process ran lately, at most. It halves in 1.4 s.

    A process that had to wait for a core most likely shares a busy machine with Redis: Redis gets twice as much more.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def heard(self, late_s: float) -> None:
        """A timer came so late: of one every 20 ms."""
        self.seconds = max(late_s, self.seconds * _FADES)

    def extended(self, budget_s: float) -> float:
        """How long Redis may take for a call with this budget."""
        return min(budget_s + 2 * self.seconds, IN_ALL * budget_s)


class TimeLimit:
    """Fails a future with StoreLate when Redis has had its time, which is less than the time that goes by while this
    process is slow.

    The time is counted in steps. A step after which the event loop comes late counts as one step, however late the loop
    is: the reply may lie in the socket. Both asyncio and uvloop read sockets before they run timers, so such a reply is
    handed out first.
    """

    __slots__ = ("_future", "_left", "_loop", "_step_s", "_timer", "_until_s", "_what")

    def __init__(self, future: asyncio.Future[Any], limit_s: float, until_s: float, what: str) -> None:
        """`until_s` (the loop's clock) ends it in any case. `what` says what was late."""
        self._future, self._what, self._until_s = future, what, until_s
        self._loop, self._left, self._step_s = future.get_loop(), _STEPS, limit_s / _STEPS
        self._timer = self._loop.call_later(self._step_s, self._step)

    def cancel(self) -> None:
        self._timer.cancel()

    def _step(self) -> None:
        if self._future.done():
            return
        self._left -= 1
        left_s = self._until_s - self._loop.time()
        if self._left and left_s > 0:
            self._timer = self._loop.call_later(min(self._step_s, left_s), self._step)
        else:
            fail(self._future, StoreLate(self._what, "gateway" if self._left else "redis"))


async def answered(reply: Awaitable[_Reply], within_s: float) -> _Reply:
    """Redis' reply. Raises StoreLate after `within_s` seconds without one, and whatever `reply` raises."""
    try:
        async with asyncio.timeout(within_s):
            return await reply
    except TimeoutError:
        raise StoreLate(f"no answer from Redis within {within_s:g} s") from None
