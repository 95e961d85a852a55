"""The maintenance of a pool, done by the gateway that holds its worker lease, with each heartbeat: records that cannot
be read are looked for (repair.py), then the keys that replicas are believed to hold are kept true and within bounds
(held_keys.py).

Each heartbeat looks at some of the replicas, those first that have waited longest. What is due goes into a queue
(task_queue.py), which is worked off for a part of each heartbeat; what is left continues with the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import structlog

from coordinator.errors import StoreError, StoreRefused
from coordinator.maintenance.held_keys import HeldKeys, Pass, due, look_at
from coordinator.maintenance.reaper import Reaper
from coordinator.maintenance.repair import Repair
from coordinator.maintenance.task_queue import TaskQueue
from coordinator.pool.account_spending import OldBudgets
from coordinator.pool.pool import Pool
from coordinator.registry import PoolState, readable

_log = structlog.get_logger("kvgate.worker")

_WORK_S = 0.45
"""The most per heartbeat: the next one waits for it."""
_LOOKS = 256
"""How many replicas a heartbeat looks at."""
_LOOKS_AT_ONCE = 128
"""Half a ms of Redis' time."""


class Worker:
    """Beats for one pool, and does its maintenance while this gateway holds the lease."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._reaper = Reaper(pool)
        self._repair = Repair(pool)
        self._old_budgets = OldBudgets(pool)
        self._queue = TaskQueue(pool.name)
        self._passes: dict[str, Pass] = {}
        self._looked_s: dict[str, float] = {}
        """When each replica was looked at last, the longest ago first (loop time)."""

    def close(self) -> None:
        """End what runs beside the heartbeat."""
        self._reaper.close()
        self._pool.maintenance_lag_s = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due."""
        return not self._queue

    async def tick(self) -> None:
        """One heartbeat, and a round of maintenance if this gateway holds the lease. Never raises: a failing store is
        noticed elsewhere, other errors are logged.
        """
        until_s = asyncio.get_running_loop().time() + _WORK_S
        try:
            state = await self._beat()
            self._reaper.go_on(state)
            with suppress(StoreError):  # the other tasks may mend what stops it
                await self._pool.subsets.keep()
            if self._pool.is_worker:
                await self._repair.repair()
                await self._old_budgets.remove()
                await self._look(state)
                await self._queue.work(until_s)
                self._pool.maintenance_lag_s = self._lag_s()
            else:
                self._hand_over()
        except (StoreError, TimeoutError):
            return
        except Exception as error:  # nobody awaits a tick
            _log.error("maintenance failed", pool=self._pool.name, error=type(error).__name__)

    async def _beat(self) -> PoolState:
        """If a record makes the heartbeat fail, nobody knows who does the maintenance: then every gateway repairs."""
        try:
            return await self._pool.beat()
        except StoreRefused:
            await self._repair.repair_all()
            raise

    async def _look(self, state: PoolState) -> None:
        """Find out what is due, for the replicas whose turn it is, and put it into the queue."""
        turn = self._turn(state)
        for first in range(0, len(turn), _LOOKS_AT_ONCE):
            names = turn[first : first + _LOOKS_AT_ONCE]
            for name, look in zip(names, await look_at(self._pool, names), strict=True):
                task, sweep = due(self._pool, state.replicas[name], look, state, self._passes.get(name))
                self._take(task, sweep)
        for name in map(readable, await self._pool.read("HKEYS", self._pool.keys.forgotten)):
            record = state.replicas.get(name)
            self._take(HeldKeys(self._pool, name, trims=True, before_ms=record.since_ms if record else 0), None)

    def _take(self, task: HeldKeys, sweep: Pass | None) -> None:
        if task.is_due:
            task.when_done = lambda: self._passed(task.replica, sweep)
            self._queue.add(task)
        elif task.name not in self._queue:
            self._passed(task.replica, sweep)

    def _passed(self, replica: str, sweep: Pass | None) -> None:
        if sweep is None:
            self._passes.pop(replica, None)
        else:
            self._passes[replica] = sweep

    def _turn(self, state: PoolState) -> list[str]:
        """The replicas to look at now."""
        now_s, looked_s = asyncio.get_running_loop().time(), self._looked_s
        for name in looked_s.keys() - state.replicas.keys():
            del looked_s[name]
            self._passes.pop(name, None)
        for name in state.replicas:
            looked_s.setdefault(name, now_s)
        turn = list(looked_s)[:_LOOKS]
        for name in turn:
            del looked_s[name]
            looked_s[name] = now_s
        return turn

    def _lag_s(self) -> float:
        """How long the replica that waits longest has waited to be looked at, or for the end of what is due."""
        longest_ago_s: Iterable[float] = self._looked_s.values()
        now_s = asyncio.get_running_loop().time()
        return max(self._queue.lag_s(), now_s - next(iter(longest_ago_s), now_s))

    def _hand_over(self) -> None:
        """Another gateway does the maintenance. If this one does it again, it begins anew."""
        self._pool.maintenance_lag_s = None
        self._queue.clear()
        self._passes.clear()
        self._looked_s.clear()
