"""The last 15 minutes of each pool: a point every 5 s, in a list in the store that all gateways read.

The gateway that does the pool's chores writes it. A point is
[Redis time in ms, requests in flight, requests that wait, mean share of the KV caches in use, tokens that the engines
found in their prefix caches, tokens that they looked up]. The last two are counters since the engines' starts; null if
no agent tells.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import orjson

from coordinator.errors import StoreError
from coordinator.pool.demand import read_demand
from coordinator.pool.pool import Pool
from coordinator.store import Store

EVERY_S, POINTS, _LIVES_S = 5.0, 180, 1800
Point = list[float | None]


class History:
    """One gateway's side of it. `run()` is a background task."""

    def __init__(self, store: Store, prefill_tokens_per_s: float) -> None:
        self._store, self._prefill_tokens_per_s = store, prefill_tokens_per_s

    def __repr__(self) -> str:
        return f"<History of {len(self._store.pool_names())} pools>"

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            for name in self._store.pool_names():
                with suppress(StoreError):
                    if (pool := self._store.pool(name)).is_worker:
                        await self._write(pool)

    async def _write(self, pool: Pool) -> None:
        await pool.read_figures()
        demand = await read_demand(pool.run, self._prefill_tokens_per_s)
        now_ms = pool.state.now_ms if pool.state is not None else 0
        point = [now_ms, demand.running_requests, demand.waiting_requests, *_caches(pool)]
        key = pool.keys.history
        await pool.read("LPUSH", key, orjson.dumps(point))
        await asyncio.gather(pool.read("LTRIM", key, 0, POINTS - 1), pool.read("EXPIRE", key, _LIVES_S))


async def read_history(pool: Pool) -> list[Point]:
    """The points of one pool, the oldest first; what is no point is left out. Raises StoreError."""
    texts = await pool.read("LRANGE", pool.keys.history, 0, POINTS - 1)
    return [point for point in map(_point, reversed(texts)) if point]


def _caches(pool: Pool) -> list[float | None]:
    engines = pool.figures.engines.values()
    used = [each["kv_usage"] for each in engines if "kv_usage" in each]
    share = round(sum(used) / len(used), 4) if used else None
    counters = "prefix_hits_tokens", "prefix_queries_tokens"
    return [share, *(sum(each.get(name, 0) for each in engines) if used else None for name in counters)]


def _point(text: bytes) -> Point:
    try:
        found: Any = orjson.loads(text)
    except ValueError:
        return []
    is_point = isinstance(found, list) and len(found) == 6
    return found if is_point and all(each is None or isinstance(each, int | float) for each in found) else []
