"""Turns of streams that broke and go on elsewhere: many of them, after many replicas died together, come one by one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

_LEAST_AT_ONCE: Final = 8
_LEAST_PER_S: Final = 10


async def turn_s(run: Callable[..., Awaitable[Any]]) -> float:
    """How long such a stream waits for its turn. `run` runs a script of its pool. Raises StoreError."""
    wait_ms = await run("resume", least_at_once=_LEAST_AT_ONCE, least_per_s=_LEAST_PER_S)
    return float(wait_ms) / 1000
