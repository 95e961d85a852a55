"""Requests that wait for room, for the tests of the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as redis

from coordinator.placement import Placement, PlaceRequest, Standing
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, beaten, chain, drained, joined, register, request
from tests.polling import eventually
from tests.redis_server import RedisServer

ONE_EACH = PolicyKnobs(max_active_requests=1)


@asynccontextmanager
async def two_gateways(server: RedisServer, replicas: int = 3) -> AsyncIterator[tuple[Pool, Pool]]:
    async with joined(server.url, "gw0") as one, joined(server.url, "gw1") as other:
        await register(one, replicas)
        await asyncio.gather(beaten(one), beaten(other))
        yield one, other
        await drained(one, other)  # what is sent now must not run in the next test


def asking(name: str, knobs: PolicyKnobs = ONE_EACH, share: float = 1.0, **changes: Any) -> PlaceRequest:
    """A request that waits if there is no room. `changes` may be those of its standing."""
    standing = {each: changes.pop(each) for each in list(changes) if each in Standing._fields}
    asked = request(name, changes.pop("keys", chain(name)), knobs=knobs, **changes)
    asked.room_share, asked.standing = share, Standing(**{"starve_ms": 60_000, **standing})
    return asked


async def fill(pool: Pool, count: int = 3) -> list[str]:
    """Places a request on each replica."""
    names = [f"full{i}" for i in range(count)]
    for name in names:
        assert await pool.place(asking(name)) is not None
    return names


async def waiting(client: redis.Redis) -> int:
    return sum(int(count) for count in (await client.hgetall(KEYS.waiting)).values())


async def queued(client: redis.Redis, pool: Pool, asked: PlaceRequest) -> asyncio.Task[Placement | None]:
    """Starts to place it, until it waits, and its gateway has heard so."""
    before = await waiting(client)
    task = asyncio.get_running_loop().create_task(pool.place(asked))

    async def is_waiting() -> bool:
        return await waiting(client) == before + 1 and asked.reservation in pool.seats.names()

    await eventually(is_waiting)
    return task
