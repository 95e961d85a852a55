"""How far the map is behind the engines: the age of the oldest event that is not applied yet."""

from __future__ import annotations

import asyncio
import random

from coordinator.errors import StoreRefused
from coordinator.pool.pool import Pool
from coordinator.registry import is_number

_MOST = 64
"""Streams that are looked at. In a larger fleet, others are each time."""


async def read_event_lag_s(pool: Pool) -> float:
    """That of the replica that is furthest behind; 0 if all events are applied. Raises StoreError."""
    followed = sorted(pool.state.agents) if pool.state is not None else []
    replicas = random.sample(followed, min(_MOST, len(followed)))
    if not replicas:
        return 0.0
    (seconds, micros), cursors = await asyncio.gather(
        pool.read("TIME"), pool.read("HMGET", pool.keys.cursors, *replicas)
    )
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    entries = [cursor.split(b" ")[0] if cursor else b"0" for cursor in cursors]
    oldest = await asyncio.gather(*map(_next_ms, [pool] * len(replicas), replicas, entries))
    return max([0.0, *((now_ms - at_ms) / 1000 for at_ms in oldest if at_ms)])


async def _next_ms(pool: Pool, replica: str, entry: bytes) -> int:
    """When the first entry behind this one was published; 0 if there is none."""
    try:
        reply = await pool.read("XREAD", "COUNT", 1, "STREAMS", pool.keys.events(replica), entry)
    except StoreRefused:  # the cursor or the stream cannot be read: gateways are about to repair it
        return 0
    at_ms = reply[0][1][0][0].split(b"-")[0] if reply else b""
    return int(at_ms) if is_number(at_ms) else 0
