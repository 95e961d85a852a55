"""Tells the store how LMCache names the chunks of resident keys, and how much a load from CPU memory or Redis saves.

Redis knows whether a chunk exists, and `place` asks it. So these reports need no order and no repetition.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress

import structlog

from coordinator.agent.agent_store import AgentStore
from coordinator.agent.blocks import BlockTable
from coordinator.agent.chunk_index import Chunk, ChunkIndex
from coordinator.agent.kv_events import Event, Stored
from coordinator.agent.rates import Rates
from coordinator.agent.residency import Resident, Transition
from coordinator.errors import StoreError, StoreRefused
from coordinator.lmcache_chunks import ChunkTier

_log = structlog.get_logger("kvgate.agent")

_MAX_DUE = 16_384
_RECENT = 8
"""The last chunk names that are tried until one chunk is found, to learn its size. LMCache stores chunks after the
answer."""
_UNSEEN_CHUNKS = 200
"""If this many chunks were named and none was found, LMCache keeps them elsewhere."""
_STEP = 0.02
"""Credits that differ by less count as equal."""
_SPEED_STEP = 0.1
"""Speeds that differ by a smaller part count as equal."""


class TierReporter:
    """Reports for one engine process."""

    def __init__(self, replica: str, table: BlockTable) -> None:
        self._replica = replica
        self._table = table
        self._tier: ChunkTier | None = None
        self._index: ChunkIndex | None = None
        self._due: dict[str, Chunk] = {}
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._named = 0
        self._chunk_bytes = 0
        self._rates = Rates()
        self._reported: tuple[float | None, float | None] | None = None
        self._reported_tokens_per_s = 0.0

    def observe(self, tier: ChunkTier | None, counters: Mapping[str, float]) -> None:
        """The tier and counters that the engine and LMCache's server tell now. A tier of None (the server is away)
        leaves the last one."""
        self._rates.observe(counters, time.monotonic())
        if tier is None or tier == self._tier:
            return
        _log.info("LMCache keeps chunks in Redis", replica=self._replica, tokens=tier.chunk_tokens, prefix=tier.prefix)
        self._tier, self._index = tier, ChunkIndex(tier, self._table)
        self._chunk_bytes, self._named, self._reported = 0, 0, None

    def apply(self, events: Iterable[Event]) -> None:
        """Index the blocks of events that the table has applied."""
        if self._index is not None:
            for event in events:
                if isinstance(event, Stored):
                    self._index.store(event)

    def note(self, transitions: Iterable[Transition]) -> None:
        """Keys became resident: LMCache stores their chunks about now."""
        if self._index is None or self._table.is_hybrid:
            return
        for each in transitions:
            if isinstance(each, Resident) and (chunk := self._index.chunk_of(each)) is not None:
                self._due[each.key] = chunk
                if not self._chunk_bytes:
                    self._recent.append(chunk.name)
        while len(self._due) > _MAX_DUE:
            del self._due[next(iter(self._due))]

    def forget(self) -> None:
        """The agent is connected anew, maybe to another store: report the credits again."""
        self._reported, self._reported_tokens_per_s = None, 0.0

    async def publish(self, store: AgentStore) -> None:
        """Write the chunk names that are due. Raises StoreError."""
        if self._due and self._tier is not None:
            due, self._due = self._due, {}
            self._named += len(due)
            k, ttl_s = store.keys, self._tier.ttl_s
            named = (
                store.ask("SET", k.chunk(key), f"{chunk.tokens} {chunk.name}", "EX", ttl_s)
                for key, chunk in due.items()
            )
            try:
                await asyncio.gather(*named)
            except StoreRefused:
                pass  # Redis is full, or forbids it: without a name, prompts are placed as cold ones
            except StoreError:
                self._due = due | self._due
                raise

    async def report(self, store: AgentStore) -> None:
        """Write what a load saves, if that changed. Raises StoreError."""
        if self._recent and not self._chunk_bytes and self._tier is not None:
            self._chunk_bytes = await self._find_size(store)
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
        if self._reported is None or any(map(_differ, now, self._reported)):
            record = f"{_text(now[0], '-')} {_text(now[1], '-' if self._tier is None else '?')}"
            with suppress(StoreRefused):
                await store.ask("HSET", store.keys.tiers, self._replica, record)
            self._reported = now
        await self._report_speed(store)

    async def _report_speed(self, store: AgentStore) -> None:
        """Write how fast the engine computes prompts, if that changed."""
        tokens_per_s = self._rates.prefill_tokens_per_s()
        if tokens_per_s and abs(tokens_per_s - self._reported_tokens_per_s) > _SPEED_STEP * self._reported_tokens_per_s:
            with suppress(StoreRefused):
                await store.ask("HSET", store.keys.rates, self._replica, round(max(1.0, tokens_per_s)))
            self._reported_tokens_per_s = tokens_per_s

    async def _find_size(self, store: AgentStore) -> int:
        """The size of a recent chunk in bytes; 0 if none is found."""
        try:
            sizes = await asyncio.gather(*(store.ask("STRLEN", name) for name in self._recent))
            return max(int(size) for size in sizes)
        except StoreRefused:  # in a Redis Cluster it may be another node's key; or the user may not read it
            return 0


def _differ(now: float | None, before: float | None) -> bool:
    return (now is None) != (before is None) or (now is not None and before is not None and abs(now - before) >= _STEP)


def _text(credit: float | None, unknown: str) -> str:
    return unknown if credit is None else f"{credit:.3g}"
