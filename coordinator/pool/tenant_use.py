"""What tenants with limits have used of them, for people: see lua/lib/limits.lua."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from coordinator.pool.pool import Pool
from coordinator.registry import time_ms

_MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True)
class TenantUse:
    """One tenant, over all gateways. In a Redis Cluster each pool has limits of its own: these are summed up."""

    active_requests: int
    requests_ms: float
    tokens_ms: float
    """How long these buckets take to leak out: a minute, if they are full. In a Redis Cluster, the fullest pool's."""

    def used(self, ms: float, per_min: int | None) -> int | None:
        """How much of a bucket is in use; None if it has no limit."""
        return None if per_min is None else round(per_min * ms / _MINUTE_MS)


async def read_use(pools: Sequence[Pool], tenants: Sequence[str]) -> dict[str, TenantUse]:
    """The use of these tenants, by name. Only those with limits are counted. Raises StoreError."""
    if not pools or not tenants:
        return {}
    now_ms = time_ms(await pools[0].read("TIME"))
    fields = [f"{kind} {quote(name, safe='')}" for name in tenants for kind in ("active", "requests", "tokens")]
    hashes = {pool.keys.tenants: pool for pool in pools}
    found = await asyncio.gather(*(pool.read("HMGET", key, *fields) for key, pool in hashes.items()))
    use = {}
    for i, name in enumerate(tenants):
        active, requests, tokens = zip(*(values[3 * i : 3 * i + 3] for values in found), strict=True)
        ahead = [[max(0.0, _number(at) - now_ms) for at in kind] for kind in (requests, tokens)]
        use[name] = TenantUse(int(sum(map(_number, active))), *map(max, ahead))
    return use


def _number(text: bytes | None) -> float:
    """0 if it is none, or no number that scripts write."""
    try:
        number = float(text) if text is not None and len(text) < 32 else 0.0
    except ValueError:
        return 0.0
    return number if 0 <= number < 1e15 else 0.0
