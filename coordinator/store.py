"""The shared store as one gateway sees it: its pools, and the connections that they use.

One connection serves all pools, but in a Redis Cluster, where each pool has its own, to the node that has its slot. All
of a pool's keys are in that slot, so what is sent to it is pipelined as to a single Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from coordinator.errors import StoreError
from coordinator.keys import pools_key
from coordinator.pool.pool import Pool
from coordinator.redis.address import is_cluster
from coordinator.store_connection import StoreConnection, StoreOptions

__all__ = ["Store", "StoreOptions"]


class Store:
    """Owns the connections; hands out one Pool per base model. Run `run()` as a task for as long as it is used."""

    def __init__(self, settings: StoreOptions, gateway: str, does_chores: bool = True) -> None:
        self.gateway = gateway
        self.on_change: Callable[[bool, str], None] = lambda _up, _reason: None
        self._does_chores = does_chores
        self._settings = settings
        self.pools_key = pools_key(settings.namespace)
        self._is_cluster = is_cluster(settings.url)
        self._home = self._line(self.pools_key)
        """The connection of all pools; in a cluster, of what belongs to none."""
        self._pools: dict[str, Pool] = {}
        self._lines: dict[str, StoreConnection] = {}
        """By pool."""
        self._running: asyncio.TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<Store {self._home}, {self._lines}>"

    def _line(self, key: str) -> StoreConnection:
        return StoreConnection(self._settings, key, self._changed)

    def _changed(self, is_up: bool, reason: str) -> None:
        self.on_change(is_up, reason)

    def is_up(self, pool: str = "") -> bool:
        """Whether placements in this pool go through the store now; without one, whether they all do."""
        lines = [self._lines[pool]] if pool in self._lines else self._all_lines()
        return all(line.is_up() for line in lines)

    @property
    def reason(self) -> str:
        """Why it is down; empty while it is up."""
        return next((line.reason for line in self._all_lines() if not line.is_up()), "")

    @property
    def warnings(self) -> list[str]:
        """What an operator should know."""
        return [warning for line in self._all_lines() for warning in line.warnings]

    def _all_lines(self) -> list[StoreConnection]:
        return list(dict.fromkeys((self._home, *self._lines.values())))

    def pool(self, name: str) -> Pool:
        """The client of one pool, made on first use."""
        pool = self._pools.get(name)
        if pool is None:
            settings = self._settings
            pool = Pool(name, self.gateway, settings.budget_s, self._does_chores, settings.namespace)
            self._pools[name] = pool
            self._lines[name] = line = self._line(pool.keys.anchor) if self._is_cluster else self._home
            line.add(pool)
            if self._is_cluster and self._running is not None:
                self._running.create_task(line.run())
        return pool

    def pool_names(self) -> list[str]:
        return list(self._pools)

    def note(self, pool: str, error: StoreError | None) -> None:
        """Count a placement's outcome: too many out of budget in a row and the pool's connection is given up."""
        self._lines[pool].note(error)

    async def ask(self, *command: Any) -> Any:
        """A plain command that belongs to no pool. Raises StoreError."""
        return await self._home.ask(*command)

    async def first_attempt(self) -> None:
        """Wait until the first attempt of every connection has ended, either way."""
        for line in self._all_lines():
            await line.first_attempt()

    async def run(self) -> None:
        """Keep the store connected, beating for every pool, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._running:
                for line in self._all_lines():
                    self._running.create_task(line.run())
        finally:
            self._running = None

    async def leave(self) -> None:
        """Deregister from every pool: what is still reserved in this gateway's name is given back at once."""
        for line in self._all_lines():
            await line.leave()
