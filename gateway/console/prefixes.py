"""The prefixes that were used last: who holds them, on which medium, how often they were hit, and what has changed.

A look reads some keys of each of some replicas, the last used first, and who of these replicas holds each key. It is
good for 5 s. All of it is bounded, so a look costs no more in a fleet of a thousand. What was not used for long, or was
used only by replicas that were not looked at, is not found.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from coordinator.errors import StoreError, StoreRefused
from coordinator.pool.owners import read_owners
from coordinator.pool.pool import Pool
from coordinator.registry import readable
from coordinator.store import Store
from gateway.console.shared_look import SharedLook

_EVERY_S = 5.0
_KEYS, _REPLICAS, _FEWEST = 256, 32, 8
"""At most so many keys of so many replicas of a pool, and at least so many of each."""
_MOST_SHOWN, _TOLD = 16, ("replica", "medium", "kind", "stale")
"""Owners of one key, and what is told of each."""
_FORGOTTEN_S = 60.0
"""What was seen is forgotten when nobody has looked for so long."""


@dataclass(slots=True)
class _Seen:
    """A prefix since the first look that found it."""

    since_ms: int
    hits: int
    holders: set[str] = field(default_factory=set)
    lost: int = 0
    """How many copies were gone at the next look."""


class Prefixes:
    """Looks at the prefixes for the pages of one gateway."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shared = SharedLook(self._look)
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._looked_s = 0.0

    async def look(self) -> bytes:
        """The prefixes, those with the most hits first, as JSON. Raises StoreError."""
        return await self._shared.get(_EVERY_S)

    async def _look(self) -> dict[str, Any]:
        pools = [self._store.pool(name) for name in sorted(self._store.pool_names())]
        found = [prefix for pool in pools for prefix in await _of_pool(pool)]
        self._note_changes(found)
        return {"prefixes": sorted(found, key=lambda each: (-each["hits"], -each["last_use_ms"]))}

    def _note_changes(self, found: list[dict[str, Any]]) -> None:
        """Say of each prefix what has changed since the first look that found it."""
        now_s, now_ms = time.monotonic(), int(time.time() * 1000)
        if now_s - self._looked_s > _FORGOTTEN_S:
            self._seen.clear()
        self._looked_s = now_s
        before, self._seen = self._seen, {}
        for prefix in found:
            name = prefix["pool"], prefix["key"]
            seen = before.get(name) or _Seen(now_ms, prefix["hits"])
            holders = {owner["replica"] for owner in prefix["owners"]}
            seen.lost += len(seen.holders - holders)
            seen.holders = holders
            self._seen[name] = seen
            prefix["since_ms"] = seen.since_ms
            prefix["hits_since"] = max(0, prefix["hits"] - seen.hits)
            prefix["copies_lost"] = seen.lost


async def _of_pool(pool: Pool) -> list[dict[str, Any]]:
    if not (replicas := sorted(pool.records)):
        return []
    chosen = random.Random(pool.name).sample(replicas, min(_REPLICAS, len(replicas)))  # the same ones at each look
    last = max(_FEWEST, _KEYS // len(chosen)) - 1
    held = await asyncio.gather(
        *(pool.read("ZREVRANGE", pool.keys.held(replica), 0, last) for replica in chosen), return_exceptions=True
    )
    if all(isinstance(part, BaseException) for part in held):
        raise StoreError("no replica's keys could be read")
    found = {readable(key) for part in held if not isinstance(part, BaseException) for key in part}
    keys = [key for key in found if key.isalnum()]
    owned = await read_owners(pool, keys, chosen)
    copies = await asyncio.gather(*(_count(pool, key) for key in keys))
    shown = (_shown(pool.name, each["key"], each["owners"], count) for each, count in zip(owned, copies, strict=True))
    return [each for each in shown if each]


async def _count(pool: Pool, key: str) -> int:
    try:
        return int(await pool.read("HLEN", pool.keys.own(key)))
    except StoreRefused:  # somebody else wrote there
        return 0


def _shown(pool: str, key: str, owners: list[dict[str, Any]], copies: int) -> dict[str, Any] | None:
    """One prefix; None if none of the replicas that were looked at holds it any more. `copies` are all that the map
    has, of other replicas too."""
    live = [owner for owner in owners if not owner["stale"]]
    if not live:
        return None
    return {
        "pool": pool,
        "key": key,
        "tokens": max((owner["tokens"] for owner in live if "tokens" in owner), default=None),
        "hits": max(owner["hits"] for owner in live),
        "copies": max(len(live), copies - (len(owners) - len(live))),
        "last_use_ms": max(owner["last_use_ms"] for owner in live),
        "owners": [{name: owner[name] for name in _TOLD} for owner in live[:_MOST_SHOWN]],
    }
