"""What an agent sees of its engine over HTTP, and what it needs for that. The coordinator itself speaks no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coordinator.agent.chunkbook import ChunkTier


class EngineAway(Exception):
    """The engine cannot be reached, or does not answer as one."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine at one moment."""

    pool: str
    url: str
    started: str
    """Its process' start time, in hex milliseconds: the name of its life; empty where it does not tell."""
    capacity_tokens: int = 0
    block_size: int = 0
    version: tuple[int, ...] = ()
    """Empty where it does not tell."""
    events: str = ""
    """The ZMQ endpoint of its KV events; empty where it publishes none."""
    replay: str = ""
    waiting: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    """Of the engine, and of the LMCache server beside it: see facts.py and lmcache_server.py in coordinator/engine/."""
    tier: ChunkTier | None = None
    """How that server keeps chunks in Redis; None without one."""


class EngineProbe(Protocol):
    """One replica's engine, as something with HTTP sees it."""

    async def look(self) -> EngineSnapshot:
        """Raises EngineAway."""
        ...

    async def detokenize(self, tokens: Sequence[int]) -> str | None:
        """The text of a sequence of tokens; None where it cannot tell (now)."""
        ...
