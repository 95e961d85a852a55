"""Who waits in a pool's queue, since when, and why: for `kvgate queue`.

It is read in several steps, so a request may be granted in between. Only counts and tenants' names are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import unquote

from coordinator.pool.pool import Pool
from coordinator.registry import ReplicaRecord, each, is_number, pairs, readable, time_ms

_MOST_LINES, _MOST_TENANTS = 32, 32
_PARKED = 1e15
"""See lua/lib/queue.lua."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The requests of one tenant, or of one API key that has too many in flight, that wait in one line."""

    band: int
    """0 goes first."""
    queue: str
    """See lua/lib/queue.lua."""
    pinned: str
    """The only replica that can serve them; empty if there are others."""
    tried: list[str]
    """The replicas that failed to serve them."""
    tenant: str
    """Of an API key, its account: `key:<id>`."""
    requests: int
    oldest_s: float
    """How long the first of them has waited."""
    why: str
    """`concurrency`: it has as many requests in flight as it may have. `no_room`: no replica has room.
    `room_share`: some have, but not in the part of it that the band may use. `prefers`: one has, but the first request
    waits a little for another one, which holds its prompt."""


@dataclass(frozen=True, slots=True)
class Room:
    """One replica's room."""

    replica: str
    state: str
    """Of its record; `drained` if it is draining, and has no request and no key any more."""
    active_requests: int
    slots: int | None
    """How many requests it may have; None: any number."""
    backlog_s: float
    """How long it computes the prompts that it has."""
    max_wait_s: float
    """From how many seconds on it has no room; 0: never."""
    has_room: bool

    def has_room_for(self, share: float) -> bool:
        """Whether it has room for a band that may use this part of it: see lua/lib/room.lua."""
        has_slot = self.slots is None or self.active_requests < max(1, int(self.slots * share))
        return self.state == "ready" and has_slot and (not self.max_wait_s or self.backlog_s < self.max_wait_s * share)


async def read_queue(
    pool: Pool, slots: int, max_wait_s: float, prefill_tokens_per_s: float, shares: Sequence[float] = ()
) -> tuple[list[Waiting], list[Room]]:
    """Who waits, and the replicas' room. The settings are a gateway's. `shares` are the parts of the room that the
    bands may use: 1 for those that are not told. Raises StoreError."""
    now_ms = time_ms(await pool.read("TIME"))
    lines = sorted(pairs(await pool.read("HGETALL", pool.keys.waiting)))[:_MOST_LINES]
    rooms = await _rooms(pool, slots, max_wait_s, prefill_tokens_per_s)
    named = [name for name in lines if is_number(name.partition(" ")[0])]
    found = await asyncio.gather(*(_line(pool, name, now_ms, _room_of(name, rooms, shares)) for name in named))
    return [one for line in found for one in line], rooms


def _room_of(name: str, rooms: Sequence[Room], shares: Sequence[float]) -> str:
    """Why the requests of a line would wait: `no_room`, `room_share`, or "" if there is room for them."""
    band = int(name.partition(" ")[0])
    share = shares[band] if band < len(shares) else 1.0
    if not any(room.has_room for room in rooms):
        return "no_room"
    return "" if any(room.has_room_for(share) for room in rooms) else "room_share"


async def _line(pool: Pool, name: str, now_ms: int, lacks: str) -> list[Waiting]:
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
            why="concurrency" if tag >= _PARKED else lacks or ("prefers" if _is_patient(head, now_ms) else "no_room"),
        )
        for tenant, tag, count, head in zip(names, tags, counts, heads, strict=True)
    ]


def _is_patient(head: Sequence[bytes], now_ms: int) -> bool:
    """Whether the first one in a line waits for a replica that holds its prompt: see lua/lib/queue.lua."""
    *_, key, until_ms = [b"-", b"0", *(head[0].split(b" ") if head else [])]
    return not key.startswith(b"-") and is_number(until_ms) and int(until_ms) > now_ms


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
        if state == "draining" and not requests and not await pool.read("EXISTS", keys.held(name)):
            state = "drained"
        room = Room(name, state, requests, slots or None, round(backlog_s, 3), max_wait_s, has_room=False)
        rooms.append(replace(room, has_room=room.has_room_for(1.0)))
    return rooms


def _number(text: str | None) -> int:
    return int(text) if text is not None and is_number(text) else 0
