"""The records of requests that have ended, in the store: the last ones, as many as fit into so many bytes.

They are fields of a ring of hashes. One of these gets records; when it is full, or old, the next one is emptied and
gets them. So the oldest go first, and nothing is counted record by record. A field is the request's name. If a name
comes again in the same hash, its text takes the place of the earlier one: to read that first would make Redis' part
twice as large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from coordinator.keys import decision_ring_key, decision_slot_key
from coordinator.store import Store

SLOTS = 16
LEAST_BYTES = 2**20
"""The smallest ring. Less than a call of `keep` would fill a slot."""
CALL_BYTES = LEAST_BYTES // SLOTS // 2
"""So many bytes at a time: no call holds up Redis for more than some 100 us."""
_TTL_S = 7 * 24 * 3600
_FIELD_BYTES = 140
"""What Redis takes for a field of a large hash, besides its name and its text: also what allocators round up."""


class DecisionRing:
    """One cluster's ring. All methods raise StoreError."""

    def __init__(self, store: Store, namespace: str) -> None:
        self._store, self._key = store, decision_ring_key(namespace)
        self._slots = [decision_slot_key(namespace, slot) for slot in range(SLOTS)]
        self._at: int | None = None
        """How many slots were begun before the one that gets records; None until the store has told."""

    async def keep(self, texts: Mapping[str, bytes], max_bytes: int) -> None:
        """Keep these texts, by name. If Redis refuses it because its memory is full, StoreRefused `is_full`."""
        if self._at is None:
            self._at = await self._count(0, 0, max_bytes)
        at, slot = self._at, self._slots[self._at % SLOTS]
        added = sum(len(name) + len(text) + _FIELD_BYTES for name, text in texts.items())
        write = self._store.ask("HSET", slot, *chain.from_iterable(texts.items()))
        _, self._at = await asyncio.gather(write, self._count(at, added, max_bytes))

    async def _count(self, written: int, added: int, max_bytes: int) -> Any:
        operands = {"max_bytes": max_bytes, "ttl_s": _TTL_S, "written": written, "added": added}
        return await self._store.ask_script("keep", self._key, decided=self._key, slots=self._slots, **operands)

    async def find(self, names: Sequence[str]) -> list[bytes]:
        """The texts of these names."""
        found = await asyncio.gather(*(self._store.ask("HMGET", slot, *names) for slot in self._slots))
        return [text for text in chain.from_iterable(found) if text is not None]

    async def drop(self) -> None:
        """Give all of its memory back."""
        self._at = None
        await self._store.ask("UNLINK", self._key, *self._slots)
