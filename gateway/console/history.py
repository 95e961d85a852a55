"""The last 15 minutes of each pool: a point every 5 s, in a list in the store that all gateways read.

The gateway that does the pool's maintenance writes it. A point is a list of numbers, in the order of POINT. Those that
end with `_sum` or `_total` are counters: a curve shows by how much they have risen. null: not known.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import orjson

from coordinator.errors import StoreError, StoreRefused
from coordinator.pool.demand import read_demand
from coordinator.pool.pool import Pool
from coordinator.registry import is_number
from coordinator.store import Store
from gateway.metrics.first_tokens import FirstTokens

EVERY_S, POINTS, _LIVES_S = 5.0, 180, 1800
POINT = (
    "time_ms",  # Redis time
    "running_requests",
    "waiting_requests",
    "kv_usage",  # the mean share of the KV caches in use
    "cached_tokens_total",  # tokens that the engines found in their prefix caches, since their starts
    "looked_up_tokens_total",  # tokens that they looked up there
    "first_tokens_total",  # streamed answers that have begun
    "first_tokens_ms_sum",  # the sum of their times to first token
    "event_lag_s",  # the time from a KV event to the map, of the slowest replica
    "chores_lag_s",  # how far the pool's maintenance is behind
)
Point = list[float | None]


class History:
    """One gateway's side of it. `run()` is a background task."""

    def __init__(self, store: Store, first_tokens: FirstTokens, prefill_tokens_per_s: float) -> None:
        self._store, self._first_tokens, self.prefill_tokens_per_s = store, first_tokens, prefill_tokens_per_s

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            for name in self._store.pool_names():
                pool = self._store.pool(name)
                with suppress(StoreError):
                    await self._add_first_tokens(pool)
                    if pool.is_worker:
                        await self._write(pool)

    async def _add_first_tokens(self, pool: Pool) -> None:
        """Add what this gateway has measured to the sums of all."""
        count, sum_s = self._first_tokens.take(pool.name)
        if count:
            key = pool.keys.first_tokens
            added = ("count", count), ("ms", round(sum_s * 1000))
            try:
                await asyncio.gather(*(pool.read("HINCRBY", key, name, by) for name, by in added))
            except StoreRefused as error:
                await _remove_foreign(pool, key, error)
            await pool.read("EXPIRE", key, _LIVES_S)

    async def _write(self, pool: Pool) -> None:
        await pool.read_figures()
        demand = await read_demand(pool.run, self.prefill_tokens_per_s)
        now_ms = pool.state.now_ms if pool.state is not None else 0
        begun = await pool.read("HMGET", pool.keys.first_tokens, "count", "ms")
        lags_s = _event_delay_s(pool), pool.maintenance_lag_s
        counts = demand.running_requests, demand.waiting_requests
        point = [now_ms, *counts, *_caches(pool), *map(_count, begun), *lags_s]
        key = pool.keys.history
        try:
            await pool.read("RPUSH", key, orjson.dumps(point))
        except StoreRefused as error:
            await _remove_foreign(pool, key, error)
        await asyncio.gather(pool.read("LTRIM", key, -POINTS, -1), pool.read("EXPIRE", key, _LIVES_S))


async def _remove_foreign(pool: Pool, key: str, refusal: StoreRefused) -> None:
    """Remove what somebody else wrote there. Raises any other refusal: of a full store, for example."""
    if not (refusal.is_wrong_type or any(words in str(refusal) for words in ("not an integer", "overflow"))):
        raise refusal
    await pool.read("UNLINK", key)


async def read_history(pool: Pool) -> list[Point]:
    """The points of one pool, the oldest first; what is no point is left out. Raises StoreError."""
    try:
        texts = await pool.read("LRANGE", pool.keys.history, -POINTS, -1)
    except StoreRefused:  # it is no list: it is about to be written anew
        return []
    return [point for point in map(_point, texts) if point]


def _event_delay_s(pool: Pool) -> float:
    state, engines = pool.state, pool.figures.engines
    told = [name for name in engines if state is not None and state.is_told(name)]
    return max((engines[name].get("event_delay_s", 0.0) for name in told), default=0.0)


def _caches(pool: Pool) -> list[float | None]:
    engines = pool.figures.engines.values()
    used = [each["kv_usage"] for each in engines if "kv_usage" in each]
    share = round(sum(used) / len(used), 4) if used else None
    counters = "prefix_hits_tokens", "prefix_queries_tokens"
    return [share, *(sum(each.get(name, 0) for each in engines) if used else None for name in counters)]


def _count(text: bytes | None) -> int:
    return int(text) if text is not None and is_number(text) else 0


def _point(text: bytes) -> Point:
    try:
        found: Any = orjson.loads(text)
    except ValueError:
        return []
    is_point = isinstance(found, list) and len(found) == len(POINT)
    return found if is_point and all(each is None or isinstance(each, int | float) for each in found) else []
