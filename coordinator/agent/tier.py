"""What an agent says of LMCache's chunks: what they are called, and what loading from them saves.

Nothing is said of whether a chunk is there: Redis itself knows that, and `place` asks it. So nothing here has to be in
order, or said twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress

import structlog

from coordinator.agent.blocks import BlockTable
from coordinator.agent.chunkbook import Chunk, ChunkBook
from coordinator.agent.events import Event, Stored
from coordinator.agent.link import Link
from coordinator.agent.rates import Rates
from coordinator.agent.residents import Resident, Transition
from coordinator.errors import StoreRefused
from coordinator.lmcache_chunks import ChunkTier

_log = structlog.get_logger("kvgate.agent")

_MAX_DUE = 16_384
_SEEK = 8
"""Names of chunks that are looked for until one is found: LMCache stores them behind the answers."""
_UNSEEN_CHUNKS = 200
"""If none of so many is found, they are somewhere else."""
_STEP = 0.02
"""Credits that differ by less are the same."""


class Tier:
    """One engine life's tiers beyond its GPU."""

    def __init__(self, replica: str, table: BlockTable) -> None:
        self._replica = replica
        self._table = table
        self._tier: ChunkTier | None = None
        self._book: ChunkBook | None = None
        self._due: dict[str, Chunk] = {}
        self._recent: deque[str] = deque(maxlen=_SEEK)
        self._named = 0
        self._chunk_bytes = 0
        self._rates = Rates()
        self._said: tuple[float | None, float | None] | None = None

    def look(self, tier: ChunkTier | None, counters: Mapping[str, float]) -> None:
        """What the engine and LMCache's server say of themselves now. While that is away, what it said last holds."""
        self._rates.observe(counters)
        if tier is None or tier == self._tier:
            return
        _log.info("LMCache keeps chunks in Redis", replica=self._replica, tokens=tier.chunk_tokens, prefix=tier.prefix)
        self._tier, self._book = tier, ChunkBook(tier, self._table)
        self._chunk_bytes, self._named, self._said = 0, 0, None

    def apply(self, events: Iterable[Event]) -> None:
        """Events that the table has worked in."""
        if self._book is not None:
            for event in events:
                if isinstance(event, Stored):
                    self._book.store(event)

    def note(self, transitions: Iterable[Transition]) -> None:
        """Keys that became resident: their chunks are stored about now."""
        if self._book is None or self._table.is_hybrid:
            return
        for each in transitions:
            if isinstance(each, Resident) and (chunk := self._book.chunk_of(each)) is not None:
                self._due[each.key] = chunk
                if not self._chunk_bytes:
                    self._recent.append(chunk.name)
        while len(self._due) > _MAX_DUE:
            del self._due[next(iter(self._due))]

    def forget(self) -> None:
        """Another store knows nothing of what was said."""
        self._said = None

    async def publish(self, link: Link) -> None:
        """Say what chunks are called. Raises StoreError."""
        if self._due and self._tier is not None:
            due, self._due = self._due, {}
            self._named += len(due)
            k, ttl_s = link.keys, self._tier.ttl_s
            named = (
                link.ask("SET", k.chunk(key), f"{chunk.tokens} {chunk.name}", "EX", ttl_s) for key, chunk in due.items()
            )
            with suppress(StoreRefused):  # full, or not for this user to write: what is not named is placed as cold
                await asyncio.gather(*named)

    async def report(self, link: Link) -> None:
        """Say what loading saves, where that has changed. Raises StoreError."""
        if self._recent and not self._chunk_bytes and self._tier is not None:
            self._chunk_bytes = await self._seek(link)
            if not self._chunk_bytes and self._named > _UNSEEN_CHUNKS:
                self._recent.clear()
                _log.warning(
                    "LMCache's chunks are not in this Redis, or its user may not see them (ACL: %R~PREFIX@*): prompts "
                    "that only they hold are placed as cold ones",
                    replica=self._replica,
                    prefix=self._tier.prefix,
                )
        token_bytes = None
        if self._chunk_bytes and self._tier is not None:
            token_bytes = self._chunk_bytes * self._tier.world_size / self._tier.chunk_tokens
        now = (self._rates.cpu_credit(token_bytes), self._rates.store_credit(token_bytes))
        if self._said is None or any(map(_differ, now, self._said)):
            told = f"{_text(now[0], '-')} {_text(now[1], '-' if self._tier is None else '?')}"
            with suppress(StoreRefused):
                await link.ask("HSET", link.keys.tiers, self._replica, told)
            self._said = now

    async def _seek(self, link: Link) -> int:
        """The size of a chunk, where one is there."""
        try:
            sizes = await asyncio.gather(*(link.ask("STRLEN", name) for name in self._recent))
            return max(int(size) for size in sizes)
        except StoreRefused:  # of a Redis Cluster, another node's, or not for this user to see
            return 0


def _differ(now: float | None, said: float | None) -> bool:
    return (now is None) != (said is None) or (now is not None and said is not None and abs(now - said) >= _STEP)


def _text(credit: float | None, unknown: str) -> str:
    return unknown if credit is None else f"{credit:.3g}"
