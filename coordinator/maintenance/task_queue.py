"""The maintenance tasks of a pool that are due, done piece by piece in turns, within a bounded share of Redis' time.

Pieces of several replicas are sent together. Redis runs them one behind another, and a placement waits for at most all
of them: so together they take one to three ms. Then tasks rest for REST_PER_WORK times as long as these pieces took,
the way to Redis and other commands included. So they take at most 1 / (1 + REST_PER_WORK) of Redis' time, and less
while Redis or this gateway is busy.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from coordinator.errors import StoreRefused

_log = structlog.get_logger("kvgate.maintenance")

REST_PER_WORK = 5.0
_MAX_REST_S = 0.03
"""So that maintenance goes on while Redis or this gateway is very busy."""
_AT_ONCE = 4


def rest_s(begun_s: float) -> float:
    """How long to leave Redis to others, after work that began at this time (loop time)."""
    return min(_MAX_REST_S, REST_PER_WORK * (asyncio.get_running_loop().time() - begun_s))


class MaintenanceTask(Protocol):
    """Work on one replica's keys. It takes any number of pieces."""

    name: str
    """Of its kind and its replica: two tasks of one name are the same."""
    is_urgent: bool

    async def do_piece(self) -> bool:
        """Do one piece; returns whether the task is done. Raises StoreError."""


class TaskQueue:
    """Tasks in two lines, urgent and routine. If both have tasks, pieces come from both. A task has one piece done in
    its turn and then goes to the end of its line, so no task waits for a long one to end."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._due: dict[str, tuple[MaintenanceTask, float]] = {}
        """The tasks by name, in the order of their turns, and when each became due (loop time)."""

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, name: str) -> bool:
        return name in self._due

    def add(self, task: MaintenanceTask) -> None:
        """A task of this name that is in the queue stays, unless it is routine and this one is urgent."""
        before, _ = self._due.get(task.name, (None, 0.0))
        if before is None or (task.is_urgent and not before.is_urgent):
            self._due.pop(task.name, None)
            self._due[task.name] = task, asyncio.get_running_loop().time()

    def clear(self) -> None:
        """Another gateway does the maintenance now."""
        self._due.clear()

    def lag_s(self) -> float:
        """For how long the oldest task has been due; 0 if there is none."""
        now_s = asyncio.get_running_loop().time()
        return now_s - min((since_s for _, since_s in self._due.values()), default=now_s)

    async def work(self, until_s: float) -> None:
        """Do pieces until nothing is due, or until this time (loop time), at least once; the next call continues.
        Raises StoreError."""
        loop = asyncio.get_running_loop()
        while self._due:
            begun_s = loop.time()
            await self._do_pieces(self._next())
            if loop.time() + rest_s(begun_s) >= until_s:
                return
            await asyncio.sleep(rest_s(begun_s))

    def _next(self) -> list[MaintenanceTask]:
        """The tasks whose turn it is. A line with few tasks leaves its share to the other."""
        urgent = [task for task, _ in self._due.values() if task.is_urgent]
        routine = [task for task, _ in self._due.values() if not task.is_urgent]
        urgent = urgent[: max(_AT_ONCE // 2, _AT_ONCE - len(routine))]
        return urgent + routine[: _AT_ONCE - len(urgent)]

    async def _do_pieces(self, tasks: list[MaintenanceTask]) -> None:
        outcomes = await asyncio.gather(*(task.do_piece() for task in tasks), return_exceptions=True)
        failure: BaseException | None = None
        for task, outcome in zip(tasks, outcomes, strict=True):
            its_turn = self._due.pop(task.name)
            if outcome is False:
                self._due[task.name] = its_turn
            elif isinstance(outcome, StoreRefused):  # a key of another type: repair.py removes it, then it is due again
                _log.info("a maintenance task was refused", pool=self._pool, task=task.name, reason=str(outcome))
            elif isinstance(outcome, BaseException):
                failure = outcome
        if failure is not None:
            raise failure
