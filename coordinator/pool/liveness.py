"""Whether replicas get on with their work, as gateways tell one another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coordinator.pool.pool import Pool


def show(pool: Pool, pieces: Mapping[str, int]) -> None:
    """These replicas have sent this gateway something of an answer: so many pieces until now."""
    shown = [text for replica, count in pieces.items() for text in (replica, f"{pool.gateway} {count}")]
    pool.read("HSET", pool.keys.progress, *shown)


def shown(pool: Pool, replica: str) -> asyncio.Future[Any]:
    """What a gateway showed of it last: while it is the same, the replica has sent nobody anything."""
    return pool.read("HGET", pool.keys.progress, replica)


def mark(pool: Pool, replica: str, incarnation: str, before: str, after: str) -> None:
    """Change a replica's state in the registry, where it is still this life of it, and in that state."""
    record = pool.records.get(replica)
    if record is not None and (record.incarnation, record.state) == (incarnation, before):
        pool.records[replica] = replace(record, state=after)
    pool.run("mark", replica=replica, incarnation=incarnation, before=before, after=after)
