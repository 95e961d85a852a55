"""The shared store as one gateway sees it: its pools, and the connections that they use.

One connection serves all pools, but in a Redis Cluster, where each pool has its own, to the node that has its slot. All
of a pool's keys are in that slot, so what is sent to it is pipelined as to a single Redis. There, a key that belongs to
no pool has a connection of its own, too, from the first question about it on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from coordinator.errors import StoreDown, StoreError
from coordinator.keys import PoolKeys, pools_key
from coordinator.pool.pool import Pool
from coordinator.redis.address import connect as open_wire
from coordinator.redis.address import is_cluster
from coordinator.redis.time_limit import LoopLag
from coordinator.store_connection import CONNECT_S, StoreConnection, StoreOptions

__all__ = ["Store", "StoreOptions"]

_TAG = re.compile(r"\{([^}]+)\}")
"""A key's hash tag."""


class Store:
    """Owns the connections; hands out one Pool for each base model. Run `run()` as a task while it is used."""

    def __init__(self, settings: StoreOptions, gateway: str) -> None:
        self.gateway = gateway
        self.on_change: Callable[[bool, str], None] = lambda _up, _reason: None
        self.on_news: Callable[[], None] = lambda: None
        """Called when a heartbeat has told something new of any pool's replicas."""
        self.lag = LoopLag()
        self._settings = settings
        self.pools_key = pools_key(settings.namespace)
        self._is_cluster = is_cluster(settings.url)
        self._home = self._connect(self.pools_key)
        """The connection of all pools; in a Redis Cluster, that of the set of pools."""
        self._of_keys: dict[str, StoreConnection] = {}
        """In a Redis Cluster: those of other keys that belong to no pool, by what decides on their slot."""
        self._pools: dict[str, Pool] = {}
        self._connections: dict[str, StoreConnection] = {}
        """By pool."""
        self._running: asyncio.TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<Store {self._home}, {self._connections}>"

    def _connect(self, key: str) -> StoreConnection:
        return StoreConnection(self._settings, key, self._changed, self.lag)

    def _news(self) -> None:
        self.on_news()

    def _changed(self, is_up: bool, reason: str) -> None:
        self.on_change(is_up, reason)

    def is_up(self, pool: str = "") -> bool:
        """Whether placements in this pool go through the store now; without a name, whether those of all pools do."""
        connections = [self._connections[pool]] if pool in self._connections else self._all_connections()
        return all(one.is_up() for one in connections)

    @property
    def has_one_slot(self) -> bool:
        """Whether one script can use the keys of several pools; not in a Redis Cluster."""
        return not self._is_cluster

    def is_connected(self, pool: str) -> bool:
        """Whether this pool's heartbeats go through the store now; its placements may be paused."""
        return self._connections[pool].is_connected() if pool in self._connections else self._home.is_connected()

    @property
    def reason(self) -> str:
        """Why it is down; empty while it is up."""
        return next((one.reason for one in self._all_connections() if not one.is_up()), "")

    @property
    def warnings(self) -> list[str]:
        """What an operator should know."""
        return [warning for one in self._all_connections() for warning in one.warnings]

    def _all_connections(self) -> list[StoreConnection]:
        return list(dict.fromkeys((self._home, *self._connections.values())))

    def pool(self, name: str) -> Pool:
        """The client of one pool, made at first use."""
        pool = self._pools.get(name)
        if pool is None:
            settings = self._settings
            anchor = PoolKeys(name, settings.namespace).anchor
            connect = partial(open_wire, settings.url, anchor, CONNECT_S)
            pool = Pool(name, self.gateway, settings.budget_s, settings.namespace, connect, self.lag)
            pool.on_news = self._news
            self._pools[name] = pool
            self._connections[name] = connection = self._connect(pool.keys.anchor) if self._is_cluster else self._home
            connection.add(pool)
            if self._is_cluster and self._running is not None:
                self._running.create_task(connection.run())
        return pool

    def pool_names(self) -> list[str]:
        return list(self._pools)

    def note(self, pool: str, error: StoreError | None) -> None:
        """Count a placement's outcome. After too many late ones in a row, placements in this pool are paused."""
        self._connections[pool].note(error)

    async def ask(self, command: str, key: str, *arguments: Any) -> Any:
        """A plain command about a key that belongs to no pool. Raises StoreError."""
        return await (await self._connection_of(key)).ask(command, key, *arguments)

    async def ask_script(self, script: str, key: str, **operands: Any) -> Any:
        """Run a script about keys that belong to no pool; `key` is one of them. Raises StoreError."""
        return await (await self._connection_of(key)).ask_script(script, **operands)

    async def _connection_of(self, key: str) -> StoreConnection:
        if not self._is_cluster or key == self.pools_key:
            return self._home
        tag = _TAG.search(key)
        slot = tag[1] if tag is not None else key
        connection = self._of_keys.get(slot) or self._connect_for(slot, key)
        await connection.first_attempt()
        return connection

    def _connect_for(self, slot: str, key: str) -> StoreConnection:
        if self._running is None:
            raise StoreDown("the store is not connected")
        connection = self._of_keys[slot] = StoreConnection(self._settings, key, lambda _up, _reason: None, self.lag)
        self._running.create_task(connection.run())
        return connection

    async def first_attempt(self) -> None:
        """Wait until every connection has tried once to connect, with or without success."""
        for connection in self._all_connections():
            await connection.first_attempt()

    async def run(self) -> None:
        """Keep the store connected, beating for every pool, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._running:
                for connection in self._all_connections():
                    self._running.create_task(connection.run())
        finally:
            self._running = None
            self._of_keys.clear()
            for pool in self._pools.values():
                await pool.seats.close()

    async def leave(self) -> None:
        """Deregister from every pool: everything still reserved in this gateway's name is given back at once."""
        for connection in self._all_connections():
            await connection.leave()
