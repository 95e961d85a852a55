"""Which replicas send something of their answers, as gateways tell one another. A replica that sends nobody anything
hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from coordinator.pool.pool import Pool


def write_progress(pool: Pool, pieces: Mapping[str, int]) -> None:
    """Write how many pieces of answers each replica has sent this gateway until now."""
    fields = [text for replica, count in pieces.items() for text in (replica, f"{pool.gateway} {count}")]
    pool.read("HSET", pool.keys.progress, *fields)


def read_progress(pool: Pool, replica: str) -> asyncio.Future[Any]:
    """What a gateway wrote last for this replica. While it stays the same, the replica has sent nobody anything."""
    return pool.read("HGET", pool.keys.progress, replica)
