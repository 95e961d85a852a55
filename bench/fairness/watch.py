"""Looks at replicas and Redis while a run goes on, again and again, until it is cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import aiohttp

from bench.cluster import Cluster
from bench.embedded import connect
from coordinator.keys import PoolKeys
from coordinator.redis.wire import Wire

_LOOK_S = 0.01


async def every_look(look: Callable[[], Awaitable[None]]) -> None:
    """Looks every 10 ms, until it is cancelled."""
    while True:
        await look()
        await asyncio.sleep(_LOOK_S)


@dataclass
class MostActive:
    """The most requests that Redis ever showed for one replica."""

    keys: PoolKeys
    most: int = 0

    async def watch(self, redis_url: str) -> None:
        wire = await connect(redis_url)

        async def look() -> None:
            active = await wire.send("HVALS", self.keys.active)
            self.most = max([self.most, *map(int, active)])

        try:
            await every_look(look)
        finally:
            await wire.close("the run is over")


@dataclass
class InFlight:
    """One tenant's requests in flight at all replicas together, and in Redis.

    Replicas do not answer at the same moment, so one look may count a request that has ended and the next one, which
    began because of that. But requests that really run at once do so until one of them ends. So `most_running` is the
    largest number that two looks in a row showed.
    """

    cluster: Cluster
    tenant: str
    most_running: int = 0
    most_counted: int = 0
    """By Redis, in one step."""
    running: int = 0
    counted: int = 0
    looks: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self) -> None:
        wire = await connect(self.cluster.redis_url)
        try:
            async with aiohttp.ClientSession() as http:
                await every_look(lambda: self._look(wire, http))
        finally:
            await wire.close("the run is over")

    async def _look(self, wire: Wire, http: aiohttp.ClientSession) -> None:
        loads = await asyncio.gather(*(_requests_at(http, replica.url) for replica in self.cluster.replicas))
        counted = await wire.send("HGET", PoolKeys(self.cluster.pool).tenants, f"active {self.tenant}")
        before, self.running, self.counted = self.running, sum(loads), int(counted or 0)
        self.most_running = max(self.most_running, min(before, self.running))
        self.most_counted = max(self.most_counted, self.counted)
        self.looks += 1
        self._changed.set()
        self._changed.clear()

    async def until(self, is_true: Callable[[], bool]) -> float:
        """Waits until it is true after a look. Returns the seconds that this took."""
        began_s = time.monotonic()
        while not is_true():
            await self._changed.wait()
        return time.monotonic() - began_s


async def _requests_at(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(f"{url}/sim/load") as response:
        load: Mapping[str, int] = await response.json()
    return load["running"] + load["waiting"]


async def reserved_tokens(wire: Wire, keys: PoolKeys, gateway: str) -> dict[str, int]:
    """A gateway's reservations for tenants with limits, with the tokens that were taken for them."""
    flat = [each.decode() for each in await wire.send("HGETALL", keys.budgets(gateway))]
    return {name: int(entry.split(" ")[1]) for name, entry in zip(flat[::2], flat[1::2], strict=True)}
