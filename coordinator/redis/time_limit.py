"""Waiting for a reply with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from coordinator.errors import StoreLate

IN_ALL = 3
"""A call may take so many of its budgets, if this process itself is slow."""
STEP_S = 0.005
"""The most that one late turn of the event loop counts: a quarter of the usual budget."""
_ROUNDING_S = 1e-6
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


class TimeLimits:
    """Fails futures with StoreLate when Redis has had its time, which is less than the time that goes by while this
    process is slow.

    The time is counted in steps of STEP_S at most, by one timer for all. A step after which the event loop comes late
    counts as one step, however late the loop is: the reply may lie in the socket. Both asyncio and uvloop read sockets
    before they run timers, so such a reply is handed out first.
    """

    __slots__ = ("_ends", "_loop", "_redis_s", "_stepped_s")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """Set while there are futures to watch."""
        self._ends: list[tuple[asyncio.Future[Any], float, float, str]] = []
        """The futures, the end of their time by `_redis_s` and by the loop's clock, and what was late."""
        self._redis_s = self._stepped_s = 0.0
        """The time counted so far, and when it was counted (the loop's clock)."""

    def watch(self, future: asyncio.Future[Any], limit_s: float, until_s: float, what: str) -> None:
        """`until_s` (the loop's clock) ends it in any case. `what` says what was late. A future that is done needs no
        more than that."""
        if self._loop is None:
            self._loop = future.get_loop()
            self._stepped_s = self._loop.time()
            self._loop.call_later(min(STEP_S, limit_s), self._step)
        begun_s = self._loop.time() - self._stepped_s
        end_s = self._redis_s + (begun_s if begun_s < STEP_S else STEP_S) + limit_s
        self._ends.append((future, end_s, until_s, what))

    def _step(self) -> None:
        assert self._loop is not None
        now_s = self._loop.time()
        self._redis_s += min(now_s - self._stepped_s, STEP_S)
        self._stepped_s = now_s
        self._ends = [each for each in self._ends if not each[0].done() and not self._is_over(*each)]
        if self._ends:
            next_end_s = min(end_s for _, end_s, _, _ in self._ends) - self._redis_s
            self._loop.call_later(min(STEP_S, next_end_s), self._step)
        else:
            self._loop = None

    def _is_over(self, future: asyncio.Future[Any], end_s: float, until_s: float, what: str) -> bool:
        is_redis_late = self._redis_s > end_s - _ROUNDING_S
        if is_redis_late or self._stepped_s >= until_s:
            fail(future, StoreLate(what, "redis" if is_redis_late else "gateway"))
            return True
        return False


async def answered(reply: Awaitable[_Reply], within_s: float) -> _Reply:
    """Redis' reply. Raises StoreLate after `within_s` seconds without one, and whatever `reply` raises."""
    try:
        async with asyncio.timeout(within_s):
            return await reply
    except TimeoutError:
        raise StoreLate(f"no answer from Redis within {within_s:g} s") from None
