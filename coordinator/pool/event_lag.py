"""How far the map is behind the engines: the age of the oldest event that is not applied yet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from coordinator.errors import StoreRefused
from coordinator.pool.pool import Pool
from coordinator.registry import is_number, time_ms

_MOST = 64
"""Streams that are looked at. In a larger fleet, others are each time."""


async def read_event_lag_s(pool: Pool) -> float:
    """That of the replica that is furthest behind; 0 if all events are applied. Raises StoreError."""
    followed = sorted(pool.state.agents) if pool.state is not None else []
    replicas = random.sample(followed, min(_MOST, len(followed)))
    if not replicas:
        return 0.0
    now, cursors = await asyncio.gather(pool.read("TIME"), pool.read("HMGET", pool.keys.cursors, *replicas))
    now_ms = time_ms(now)
    entries = [cursor.split(b" ")[0] if cursor else b"0" for cursor in cursors]
    streams = map(pool.keys.events, replicas)
    oldest = await asyncio.gather(*(next_entry_ms(pool.read, *each) for each in zip(streams, entries, strict=True)))
    return max([0.0, *((now_ms - at_ms) / 1000 for at_ms in oldest if at_ms)])


async def next_entry_ms(ask: Callable[..., Awaitable[Any]], stream: str, entry: bytes | str) -> int:
    """When the first entry of a stream behind this one was published; 0 if there is none. `ask` sends a command."""
    try:
        reply = await ask("XREAD", "COUNT", 1, "STREAMS", stream, entry)
    except StoreRefused:  # the cursor or the stream cannot be read: gateways are about to repair it
        return 0
    at_ms = reply[0][1][0][0].split(b"-")[0] if reply else b""
    return int(at_ms) if is_number(at_ms) else 0
