"""Applies what agents before version 0.2 published: their script only wrote the stream, and left the map to others.

Newer agents change the map themselves, so their cursors are always at the last entry. This file, its call in worker.py
and lua/apply.lua can go when nobody runs such agents any more.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog

from coordinator.pool.pool import Pool
from coordinator.registry import is_number, pairs, readable

_log = structlog.get_logger("kvgate.maintenance")

_ENTRIES = 2
"""The most that are applied in one piece: an older agent's entry has up to 200 transitions, a ms of Redis' time."""
_CURSOR = re.compile(r"[0-9]{1,15}-[0-9]{1,15} [0-9]{1,15}")
_LINE = re.compile(
    r"\+ [0-9a-f]{32} [0-9]{1,15} [0-9]{1,15} [a-z]+ [0-9a-f]{1,16}|- [0-9a-f]{32}|reset|floor (?P<floor>[0-9]{1,15})"
)
"""A transition: see lua/publish.lua."""


class _Entry(NamedTuple):
    id: str
    number: str
    incarnation: str
    transitions: list[str]


async def unapplied(pool: Pool, replicas: Sequence[str]) -> list[OlderEntries]:
    """What is to be applied for these replicas. Raises StoreError."""
    if not replicas:
        return []
    published, cursors = await asyncio.gather(
        pool.read("HMGET", pool.keys.entries, *replicas), pool.read("HMGET", pool.keys.cursors, *replicas)
    )
    return [
        OlderEntries(pool, replica)
        for replica, entries, cursor in zip(replicas, published, cursors, strict=True)
        if entries and readable(entries) != readable(cursor or b"").partition(" ")[2]
    ]


@dataclass(slots=True, eq=False)
class OlderEntries:
    """The entries of one replica that no agent has applied: a task."""

    pool: Pool
    replica: str
    name: str = field(init=False)
    is_urgent: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.name = f"apply what an older agent says of {self.replica}"

    async def do_piece(self) -> bool:
        """Apply the next entries; returns whether there are no more. Raises StoreError."""
        keys = self.pool.keys
        cursor = readable(await self.pool.read("HGET", keys.cursors, self.replica) or b"")
        cursor = cursor if _CURSOR.fullmatch(cursor) else ""
        stream, after = keys.events(self.replica), cursor.partition(" ")[0] or "0"
        reply = await self.pool.read("XREAD", "COUNT", _ENTRIES, "STREAMS", stream, after)
        found = reply[0][1] if reply else ()
        applied = []
        for stream_id, flat in found:
            try:
                entry = _entry(readable(stream_id), flat)
            except (KeyError, ValueError):
                _log.error("an entry that no agent wrote", stream=stream, entry=readable(stream_id))
                self.pool.read("XDEL", stream, stream_id)
                continue
            applied.append(self.pool.run("apply", **_arguments(self.replica, cursor, entry)))
            cursor = f"{entry.id} {entry.number}"
        is_all = all(await asyncio.gather(*applied))  # else an older gateway was faster, or a newer agent
        return len(found) < _ENTRIES or not is_all


def _arguments(replica: str, cursor: str, entry: _Entry) -> dict[str, Any]:
    return {
        "replica": replica,
        "known_cursor": cursor,
        "stream_id": entry.id,
        "number": entry.number,
        "incarnation": entry.incarnation,
        "keys": [line.split(" ", 2)[1] for line in entry.transitions if line[0] in "+-"],
        "transitions": entry.transitions,
    }


def _entry(stream_id: str, flat: list[bytes]) -> _Entry:
    fields = pairs(flat)
    lines = fields["transitions"].split("\n")
    read = [_LINE.fullmatch(line) for line in lines]
    if not is_number(fields["n"]) or not all(
        line is not None and int(line["floor"] or 0) <= int(fields["n"]) for line in read
    ):
        raise ValueError("no entry of an agent's")
    return _Entry(stream_id, fields["n"], fields["inc"], lines)
