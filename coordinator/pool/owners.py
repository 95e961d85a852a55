"""Who owns the keys of a chain, for people: `kvgate owners` and /v1/route/explain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from coordinator.pool.pool import Pool
from coordinator.registry import each


async def read_owners(pool: Pool, keys: Sequence[str]) -> list[dict[str, Any]]:
    """For each key, shallow to deep, its owners' records. Records of a past incarnation are marked as stale; records
    that cannot be read are left out."""
    replies = await asyncio.gather(*(pool.read("HGETALL", pool.keys.own(key)) for key in keys))
    return [
        {"key": key, "owners": list(each(flat, partial(_owner, pool)).values())}
        for key, flat in zip(keys, replies, strict=True)
    ]


def _owner(pool: Pool, replica: str, record: str) -> dict[str, Any]:
    """Raises ValueError if the record cannot be read."""
    incarnation, kind, medium, span_tokens, hits, last_use_ms, by, *told = record.split(" ")
    known = pool.records.get(replica)
    is_past = known is None or known.incarnation != incarnation
    return {
        "replica": replica,
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
