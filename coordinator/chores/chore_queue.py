"""The chores of a pool that are due, done piece by piece in turns, within a bounded share of Redis' time.

Pieces of several replicas are sent together. Redis runs them one behind another, and a placement waits for at most all
of them: so together they take one to three ms. Then chores rest for REST_PER_WORK times as long as these pieces took,
the way to Redis and other commands included. So they take at most 1 / (1 + REST_PER_WORK) of Redis' time, and less
while Redis or this gateway is busy.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

import structlog

from coordinator.errors import StoreRefused

_log = structlog.get_logger("kvgate.chores")

REST_PER_WORK = 5.0
_MAX_REST_S = 0.03
"""So that chores go on while Redis or this gateway is very busy."""
_AT_ONCE = 4


async def rest_after(begun_s: float) -> None:
    """Leave Redis to others, after work that began at this time (loop time)."""
    await asyncio.sleep(_rest_s(begun_s))


def _rest_s(begun_s: float) -> float:
    return min(_MAX_REST_S, REST_PER_WORK * (asyncio.get_running_loop().time() - begun_s))


class Chore(Protocol):
    """Work on one replica's keys. It takes any number of pieces."""

    name: str
    """Of its kind and its replica: two chores of one name are the same."""

    async def do_piece(self) -> bool:
        """Do one piece; returns whether the chore is done. Raises StoreError."""


class ChoreQueue:
    """Chores in two lines, urgent and routine. If both have chores, pieces come from them by turns. Within a line each
    chore has one piece done in its turn and then goes to the end, so no chore waits for a long one to end."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._lines: tuple[deque[Chore], deque[Chore]] = deque(), deque()
        self._since_s: dict[str, float] = {}
        """When each chore became due, by name (loop time)."""

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, name: str) -> bool:
        return name in self._since_s

    def add(self, chore: Chore, is_urgent: bool) -> None:
        """The caller has asked whether a chore of this name is in the queue."""
        self._since_s[chore.name] = asyncio.get_running_loop().time()
        self._lines[0 if is_urgent else 1].append(chore)

    def clear(self) -> None:
        """Another gateway does the chores now."""
        self._since_s.clear()
        for line in self._lines:
            line.clear()

    def lag_s(self) -> float:
        """For how long the oldest chore has been due; 0 if there is none."""
        return asyncio.get_running_loop().time() - min(self._since_s.values()) if self._since_s else 0.0

    async def work(self, until_s: float) -> None:
        """Do pieces until nothing is due, or until this time (loop time), at least once; the next call continues.
        Raises StoreError."""
        loop = asyncio.get_running_loop()
        while self._since_s:
            begun_s = loop.time()
            await self._do_pieces(self._next())
            rest_s = _rest_s(begun_s)
            if loop.time() + rest_s >= until_s:
                return
            await asyncio.sleep(rest_s)

    def _next(self) -> list[tuple[deque[Chore], Chore]]:
        """The chores whose turn it is. A line with few chores leaves its share to the other."""
        urgent, routine = self._lines
        urgents = min(len(urgent), max(_AT_ONCE // 2, _AT_ONCE - len(routine)))
        routines = min(len(routine), _AT_ONCE - urgents)
        turn = [(urgent, urgent.popleft()) for _ in range(urgents)]
        return turn + [(routine, routine.popleft()) for _ in range(routines)]

    async def _do_pieces(self, chores: list[tuple[deque[Chore], Chore]]) -> None:
        outcomes = await asyncio.gather(*(chore.do_piece() for _, chore in chores), return_exceptions=True)
        failure: BaseException | None = None
        for (line, chore), outcome in zip(chores, outcomes, strict=True):
            if outcome is False:
                line.append(chore)
                continue
            del self._since_s[chore.name]
            if isinstance(outcome, StoreRefused):  # a key of another type: repair.py removes it, then it is due again
                _log.info("a chore was refused", pool=self._pool, chore=chore.name, reason=str(outcome))
            elif isinstance(outcome, BaseException):
                failure = outcome
        if failure is not None:
            raise failure
