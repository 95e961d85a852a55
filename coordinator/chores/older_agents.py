"""Applies what agents before version 0.2 published: their script only wrote the stream, and left the map to others.

Newer agents change the map themselves, so their cursors are always at the last entry. This file, its call in worker.py
and lua/apply.lua can go when nobody runs such agents any more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import structlog

from coordinator.pool.pool import Pool
from coordinator.registry import pairs, readable

_log = structlog.get_logger("kvgate.chores")

_ENTRIES = 64
"""The most of one stream that are applied at once."""
_NUMBER = re.compile(r"[0-9]{1,15}")
_LINE = re.compile(
    r"\+ [0-9a-f]{32} [0-9]{1,15} [0-9]{1,15} [a-z]+ [0-9a-f]{1,16}|- [0-9a-f]{32}|reset|floor (?P<floor>[0-9]{1,15})"
)
"""A transition: see lua/publish.lua."""


class _Entry(NamedTuple):
    id: str
    number: str
    incarnation: str
    transitions: list[str]


async def apply_older(pool: Pool, replicas: Sequence[str]) -> None:
    """Apply the entries of these replicas that no agent has applied. Raises StoreError."""
    if not replicas:
        return
    published = await pool.read("HMGET", pool.keys.entries, *replicas)
    cursors = await pool.read("HMGET", pool.keys.cursors, *replicas)
    for replica, entries, cursor in zip(replicas, published, cursors, strict=True):
        known = readable(cursor or b"")
        if entries and readable(entries) != known.partition(" ")[2]:
            await _apply(pool, replica, known)


async def _apply(pool: Pool, replica: str, cursor: str) -> None:
    stream = pool.keys.events(replica)
    reply = await pool.read("XREAD", "COUNT", _ENTRIES, "STREAMS", stream, cursor.partition(" ")[0] or "0")
    for stream_id, flat in reply[0][1] if reply else ():
        try:
            entry = _entry(readable(stream_id), flat)
        except (KeyError, ValueError):
            _log.error("an entry that no agent wrote", stream=stream, entry=readable(stream_id))
            await pool.read("XDEL", stream, stream_id)
            continue
        if not await pool.run("apply", **_arguments(replica, cursor, entry)):
            return  # an older gateway has applied it
        cursor = f"{entry.id} {entry.number}"


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
    if not _NUMBER.fullmatch(fields["n"]) or not all(
        line is not None and int(line["floor"] or 0) <= int(fields["n"]) for line in read
    ):
        raise ValueError("no entry of an agent's")
    return _Entry(stream_id, fields["n"], fields["inc"], lines)
