"""A cluster whose clients belong to tenants, for tests of the queue, of limits and of operators."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import redis.asyncio as redis

from coordinator.keys import PoolKeys
from tests.chaos.stage import Stage
from tests.cluster.clients import ask, held_stream
from tests.cluster.ledger import Ledger
from tests.polling import eventually

EACH = 2
SLOTS = 3 * EACH
"""If `policy.max_active_requests` is EACH."""
LOOKS_EVERY_S = 0.03
"""Tests that count running requests look this often: much less than any of these requests takes."""


def api_keys(tenants: Iterable[str], admins: Iterable[str]) -> list[dict[str, Any]]:
    """The configuration of one API key for each tenant: the key is the tenant's name."""
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in tenants}
    return [{"name": name, "tenant": name, "admin": name in admins, "sha256": digests[name]} for name in digests]


class TenantStage(Stage):
    """A cluster with one client for each tenant."""

    client: redis.Redis
    tenants: dict[str, httpx.AsyncClient]

    @property
    def keys(self) -> PoolKeys:
        return PoolKeys(self.cluster.pool)

    @asynccontextmanager
    async def opened(self, tenants: Iterable[str]) -> AsyncIterator[None]:
        """Opens the clients; the first one's is `http`. Heals the cluster before and after."""
        async with AsyncExitStack() as stack:
            limits, self.tenants = httpx.Limits(max_keepalive_connections=None), {}
            for name in tenants:
                headers = {"authorization": f"Bearer {name}"}
                http = httpx.AsyncClient(timeout=60, limits=limits, headers=headers)
                self.tenants[name] = await stack.enter_async_context(http)
            self.http = next(iter(self.tenants.values()))
            client = redis.Redis.from_url(self.redis.url, decode_responses=True, protocol=2)
            self.client = await stack.enter_async_context(client)
            self.ledger = Ledger(client, self.cluster.pool)
            self.heal_processes()
            await self.healed()
            yield
            self.heal_processes()
            await eventually(self.all_load_is_given_back)
            await self.waits(0)

    async def waiting(self) -> int:
        """The seats in Redis."""
        return sum(int(count) for count in await self.client.hvals(self.keys.waiting))

    async def waits(self, count: int) -> None:
        async def are_waiting() -> bool:
            return await self.waiting() == count

        await eventually(are_waiting)

    async def has_fallen_back(self) -> bool:
        return all([(await self.ready(url))["store"] == "fallback" for url in self.urls])

    async def running(self) -> int:
        """The requests that the engines run at one moment: between two looks at all of them, none began or ended."""
        before: list[tuple[int, int]] = []
        while True:
            engines = await asyncio.gather(*(self.replica_state(replica) for replica in self.cluster.replicas))
            now = [(one["requests"], one["running"]) for one in engines]
            if now == before:
                return sum(running for _, running in now)
            before = now

    @asynccontextmanager
    async def full(self) -> AsyncIterator[AsyncExitStack]:
        """Streams that last longer than the test take every slot. Closing what is yielded ends them."""
        async with AsyncExitStack() as streams:
            for number in range(SLOTS):
                await streams.enter_async_context(held_stream(self.http, self.urls[number % 2], self.new_prompt()))
            yield streams

    def ask(self, tenant: str, gateway: int, **fields: Any) -> asyncio.Task[httpx.Response]:
        asking = ask(self.tenants[tenant], self.urls[gateway], self.new_prompt(), **fields)
        return asyncio.get_running_loop().create_task(asking)
