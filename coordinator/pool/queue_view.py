"""Who waits in a pool's queue, since when, and why: for `kvgate queue`.

It is read in several steps, so a request may be granted in between. Only counts and tenants' names are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from coordinator.pool.pool import Pool
from coordinator.registry import ReplicaRecord, each, is_number, pairs, readable, time_ms

_MOST_LINES, _MOST_TENANTS = 32, 32
_PARKED = 1e15
"""See lua/lib/queue.lua."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The requests of one tenant that wait in one line."""

    band: int
    """0 goes first."""
    queue: str
    """See lua/lib/queue.lua."""
    pinned: str
    """The only replica that can serve them; empty if there are others."""
    tried: list[str]
    """The replicas that failed to serve them."""
    tenant: str
    requests: int
    oldest_s: float
    """How long the first of them has waited."""
    why: str
    """`concurrency`: the tenant has as many requests in flight as it may have. `no_room`: no replica has room.
    `prefers`: one has, but the first request waits a little for another one, which holds its prompt."""


@dataclass(frozen=True, slots=True)
class Room:
    """One replica's room."""

    replica: str
    state: str
    active_requests: int
    slots: int | None
    """How many requests it may have; None: any number."""
    backlog_s: float
    """How long it computes the prompts that it has."""
    max_wait_s: float
    """From how many seconds on it has no room; 0: never."""
    has_room: bool


async def read_queue(
    pool: Pool, slots: int, max_wait_s: float, prefill_tokens_per_s: float
) -> tuple[list[Waiting], list[Room]]:
    """Who waits, and the replicas' room. The settings are a gateway's. Raises StoreError."""
    now_ms = time_ms(await pool.read("TIME"))
    lines = sorted(pairs(await pool.read("HGETALL", pool.keys.waiting)))[:_MOST_LINES]
    rooms = await _rooms(pool, slots, max_wait_s, prefill_tokens_per_s)
    has_room = any(room.has_room for room in rooms)
    named = [name for name in lines if is_number(name.partition(" ")[0])]
    found = await asyncio.gather(*(_line(pool, name, now_ms, has_room) for name in named))
    return [one for line in found for one in line], rooms


async def _line(pool: Pool, name: str, now_ms: int, has_room: bool) -> list[Waiting]:
    band, _, queue = name.partition(" ")
    turns = await pool.read("ZRANGE", pool.keys.turns(name), 0, _MOST_TENANTS - 1, "WITHSCORES")
    names, tags = [readable(each) for each in turns[::2]], [float(each) for each in turns[1::2]]
    keys = [pool.keys.line(name, tenant) for tenant in names]
    counts = await asyncio.gather(*(pool.read("ZCARD", key) for key in keys))
    heads = await asyncio.gather(*(pool.read("ZRANGE", key, 0, 0, "WITHSCORES") for key in keys))
    _digest, pinned, tried = [*queue.split("/", 2), "", ""][:3]
    return [
        Waiting(
            band=int(band),
            queue=queue,
            pinned=pinned,
            tried=tried.split(",") if tried else [],
            tenant=unquote(tenant),
            requests=int(count),
            oldest_s=max(0.0, (now_ms - float(head[1])) / 1000) if head else 0.0,
            why="concurrency" if tag >= _PARKED else "prefers" if has_room and _is_patient(head, now_ms) else "no_room",
        )
        for tenant, tag, count, head in zip(names, tags, counts, heads, strict=True)
    ]


def _is_patient(head: Sequence[bytes], now_ms: int) -> bool:
    """Whether the first one in a line waits for a replica that holds its prompt: see lua/lib/queue.lua."""
    *_, key, until_ms = [b"-", b"0", *(head[0].split(b" ") if head else [])]
    return key != b"-" and is_number(until_ms) and int(until_ms) > now_ms


async def _rooms(pool: Pool, slots: int, max_wait_s: float, prefill_tokens_per_s: float) -> list[Room]:
    keys = pool.keys
    hashes = keys.replicas, keys.active, keys.backlog_tokens, keys.rates
    records, *others = await asyncio.gather(*(pool.read("HGETALL", key) for key in hashes))
    replicas, (active, backlog, rates) = each(records, ReplicaRecord.parse), map(pairs, others)
    rooms = []
    for name in sorted(replicas):
        requests, tokens = _number(active.get(name)), _number(backlog.get(name))
        backlog_s = tokens / (_number(rates.get(name)) or prefill_tokens_per_s)
        state = replicas[name].state
        has_room = state == "ready" and (not slots or requests < slots) and (not max_wait_s or backlog_s < max_wait_s)
        rooms.append(Room(name, state, requests, slots or None, round(backlog_s, 3), max_wait_s, has_room))
    return rooms


def _number(text: str | None) -> int:
    return int(text) if text is not None and is_number(text) else 0
