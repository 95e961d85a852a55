"""Reading ownership for people: what `kvgate owners` and /v1/route/explain show."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from coordinator.pool import Pool


async def read_owners(pool: Pool, keys: Sequence[str]) -> list[dict[str, Any]]:
    """For each key, shallow to deep, its owners' records. Owners of a past incarnation are told as stale."""
    replies = await asyncio.gather(*(pool.read("HGETALL", pool.keys.own_prefix + key) for key in keys))
    return [
        {"key": key, "owners": [_owner(pool, flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]}
        for key, flat in zip(keys, replies, strict=True)
    ]


def _owner(pool: Pool, replica: bytes, record: bytes) -> dict[str, Any]:
    incarnation, kind, medium, span_tokens, hits, last_use_ms, by, *told = record.decode().split(" ")
    known = pool.records.get(replica.decode())
    is_past = known is None or known.incarnation != incarnation
    return {
        "replica": replica.decode(),
        "incarnation": incarnation,
        "stale": is_past or (kind == "resident" and known is not None and int(by) < known.floor),
        "kind": kind,
        "medium": medium,
        "span_tokens": int(span_tokens),
        "hits": int(hits),
        "last_use_ms": int(last_use_ms),
        **({"tokens": int(told[0])} if told else {}),
        **({"block_hash": told[1]} if told[1:] else {}),
    }
