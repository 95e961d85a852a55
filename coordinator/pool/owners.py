"""Who owns the keys of a chain, for people: `kvgate owners`, /v1/route/explain and the console."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from coordinator.errors import StoreRefused
from coordinator.pool.pool import Pool
from coordinator.registry import each, is_number


async def read_owners(pool: Pool, keys: Sequence[str], among: Sequence[str] = ()) -> list[dict[str, Any]]:
    """For each key, shallow to deep, its owners' records: of all replicas, or of those `among` which one looks. Records
    of a past incarnation are marked as stale; records that cannot be read are left out."""
    reads = (_read(pool, pool.keys.own(key), among) for key in keys)
    return [
        {"key": key, "owners": list(each(flat, partial(_owner, pool)).values())}
        for key, flat in zip(keys, await asyncio.gather(*reads), strict=True)
    ]


async def _read(pool: Pool, key: str, among: Sequence[str]) -> list[bytes]:
    """The names and records of a key's owners, one after the other."""
    try:
        if not among:
            return list(await pool.read("HGETALL", key))
        records = await pool.read("HMGET", key, *among)
    except StoreRefused as error:
        if not error.is_wrong_type:
            raise
        return []  # somebody else wrote there
    return [part for name, record in zip(among, records, strict=True) if record for part in (name.encode(), record)]


def _owner(pool: Pool, replica: str, record: str) -> dict[str, Any]:
    """Raises ValueError if the record cannot be read."""
    incarnation, kind, medium, span_tokens, hits, last_use_ms, by, *told = record.split(" ")
    known = pool.records.get(replica)
    is_past = known is None or known.incarnation != incarnation
    return {
        "replica": replica,
        "incarnation": incarnation,
        "stale": is_past or (kind == "resident" and known is not None and _number(by) < known.floor),
        "kind": kind,
        "medium": medium,
        "span_tokens": _number(span_tokens),
        "hits": _number(hits),
        "last_use_ms": _number(last_use_ms),
        **({"tokens": _number(told[0])} if told else {}),
        **({"block_hash": told[1]} if told[1:] else {}),
    }


def _number(text: str) -> int:
    """Raises ValueError if it is none, or one that is larger than a counter can be."""
    if not is_number(text):
        raise ValueError("no number")
    return int(text)
