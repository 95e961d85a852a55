"""The prefixes that were used last: who holds them, on which medium, and how often they were hit.

A look reads some keys of each replica, the last used first, and all owners of each key. It is good for 5 s. The number
of keys is bounded, that of their owners is not: if a thousand replicas own the same prefix, a look is large and slow.
What was not used for long, or was used in a part of a large fleet that was not looked at, is not found.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from coordinator.errors import StoreError
from coordinator.pool.owners import read_owners
from coordinator.pool.pool import Pool
from coordinator.registry import readable
from coordinator.store import Store
from gateway.console.shared_look import SharedLook

_EVERY_S = 5.0
_KEYS, _REPLICAS, _FEWEST = 256, 32, 8
"""At most so many keys of so many replicas of a pool, and at least so many of each."""


class Prefixes:
    """Looks at the prefixes for the pages of one gateway."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shared = SharedLook(self._look)

    def __repr__(self) -> str:
        return f"<Prefixes of {len(self._store.pool_names())} pools>"

    async def look(self) -> bytes:
        """The prefixes, those with the most hits first, as JSON. Raises StoreError."""
        return await self._shared.get(_EVERY_S)

    async def _look(self) -> dict[str, Any]:
        pools = [self._store.pool(name) for name in sorted(self._store.pool_names())]
        found = [prefix for pool in pools for prefix in await _of_pool(pool)]
        return {"prefixes": sorted(found, key=lambda each: (-each["hits"], -each["last_use_ms"]))}


async def _of_pool(pool: Pool) -> list[dict[str, Any]]:
    if not (replicas := list(pool.records)):
        return []
    chosen = random.sample(replicas, min(_REPLICAS, len(replicas)))
    last = max(_FEWEST, _KEYS // len(chosen)) - 1
    held = await asyncio.gather(
        *(pool.read("ZREVRANGE", pool.keys.held(replica), 0, last) for replica in chosen), return_exceptions=True
    )
    if all(isinstance(part, BaseException) for part in held):
        raise StoreError("no replica's keys could be read")
    keys = {readable(key) for part in held if not isinstance(part, BaseException) for key in part}
    owned = await read_owners(pool, [key for key in keys if key.isalnum()])
    return [shown for each in owned if (shown := _shown(pool.name, each["key"], each["owners"]))]


def _shown(pool: str, key: str, owners: list[dict[str, Any]]) -> dict[str, Any] | None:
    """One prefix; None if nobody holds it any more."""
    live = [owner for owner in owners if not owner["stale"]]
    if not live:
        return None
    return {
        "pool": pool,
        "key": key,
        "tokens": max((owner["tokens"] for owner in live if "tokens" in owner), default=None),
        "hits": max(owner["hits"] for owner in live),
        "copies": len(live),
        "last_use_ms": max(owner["last_use_ms"] for owner in live),
        "owners": [{name: owner[name] for name in ("replica", "medium", "kind", "stale")} for owner in live],
    }
