"""What `kvgate top` draws: figures of recent requests, and tables of them. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gateway.ops.cli.printable import all_printable, printable
from gateway.ops.cli.watch import line_of

_WINDOW_S = 30.0
_LAST = 12
_MOST_RECORDS = 20_000


@dataclass
class Tally:
    """The records of the last seconds. A thread adds to it."""

    began_s: float
    records: deque[tuple[float, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=_MOST_RECORDS))
    dropped: int = 0
    trouble: str = ""
    """Why no records come."""
    problem: str = ""
    """Why nothing else comes."""

    def take(self, event: str, data: Any, now_s: float) -> None:
        """An event of the gateway's stream of decisions."""
        if event == "dropped":
            self.dropped += data
        elif event == "trouble":
            self.trouble = data
        else:
            self.records.append((now_s, data))

    def recent(self, now_s: float) -> list[dict[str, Any]]:
        """The records of the last seconds, oldest first."""
        return [record for at_s, record in list(self.records) if at_s > now_s - _WINDOW_S]


@dataclass(frozen=True)
class Figures:
    """What some requests had in common: those of one replica, or of one gateway."""

    per_s: float
    failed: int
    cached_share: float | None
    """Of their prompt tokens; None if no answer told."""
    first_byte_p50_ms: float | None

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]], seconds: float) -> Figures:
        """Records are from anybody who can write into the store, so each number is checked."""
        told = [one for one in records if _number(one, "cached_tokens") is not None and _number(one, "prompt_tokens")]
        prompts, cached = (sum(_number(one, name) or 0 for one in told) for name in ("prompt_tokens", "cached_tokens"))
        first = sorted(ms for one in records if (ms := _number(one, "first_byte_ms")) is not None)
        failed = sum((_number(one, "status") or 0) >= 500 for one in records)
        return cls(
            len(records) / seconds,
            failed,
            cached / prompts if prompts else None,
            first[len(first) // 2] if first else None,
        )

    @property
    def cells(self) -> tuple[str, ...]:
        cached = "-" if self.cached_share is None else f"{self.cached_share:.0%}"
        first = "-" if self.first_byte_p50_ms is None else f"{self.first_byte_p50_ms:.0f}"
        return f"{self.per_s:.1f}", str(self.failed), cached, first


def _number(record: dict[str, Any], name: str) -> float | None:
    value = record.get(name)
    return value if isinstance(value, int | float) else None


def view(seen: dict[str, Any], tally: Tally, sort: str, now_s: float) -> RenderableType:
    """Everything on one page. Replicas are sorted by `name`, `requests`, `rate`, `cached` or `keys`."""
    seen = all_printable(seen)
    seconds = min(_WINDOW_S, max(1.0, now_s - tally.began_s))
    recent = tally.recent(now_s)
    lines = [line_of(record) for record in recent[-_LAST:]]
    notes = [f"{tally.dropped} decisions were not shown"] if tally.dropped else []
    notes += [note for note in map(printable, (tally.trouble, tally.problem)) if note]
    parts: list[RenderableType] = [_replicas(seen, recent, sort, seconds), Text(), _gateways(recent, seconds), Text()]
    parts += [Text(_waiting(seen)), *(Text(note, style="yellow") for note in notes)]
    return Group(*parts, Text(), Text("last decisions", style="bold"), *map(Text, reversed(lines)))


_FIGURES = ("requests/s", "failed", "cached", "first byte ms")
_REPLICA = ("replica", "pool", "state", "in flight", "prompts ahead", "room", "keys", *_FIGURES)
_NARROW = ("state", "room", "keys", "requests/s", "failed", "cached")
_ORDERS: dict[str, Callable[[dict[str, Any], Figures], float]] = {
    "name": lambda _replica, _figures: 0,
    "requests": lambda replica, _figures: -replica["active_requests"],
    "rate": lambda _replica, figures: -figures.per_s,
    "cached": lambda _replica, figures: -(figures.cached_share or 0),
    "keys": lambda replica, _figures: -replica["keys"],
}
"""What comes first, by the name of an order; of equal ones, by the replica's name."""


def _replicas(seen: dict[str, Any], recent: Sequence[dict[str, Any]], sort: str, seconds: float) -> RenderableType:
    rooms = {(pool["pool"], room["replica"]): room for pool in seen["pools"] for room in pool["replicas"]}
    rows = [
        (replica, Figures.of([one for one in recent if one.get("replica") == replica["id"]], seconds))
        for replica in seen["replicas"]
    ]
    table = Table(box=None, pad_edge=False)
    for heading in _REPLICA:  # a narrow terminal wraps names and headings, and cuts nothing
        table.add_column(heading, no_wrap=heading in _NARROW, overflow="fold")
    for replica, figures in sorted(rows, key=lambda row: (_ORDERS[sort](*row), row[0]["id"])):
        room = rooms.get((replica["pool"], replica["id"]), {})
        slots = f" of {room['slots']}" if room.get("slots") else ""
        ahead, has_room = f"{room.get('backlog_s', 0):.1f} s", "yes" if room.get("has_room", True) else "no"
        names = replica["id"], replica["pool"], replica["state"]
        load = f"{replica['active_requests']}{slots}", ahead, has_room, str(replica["keys"])
        table.add_row(*map(escape, (*names, *load, *figures.cells)))
    return table


def _gateways(recent: Sequence[dict[str, Any]], seconds: float) -> RenderableType:
    table = Table("gateway", *_FIGURES, box=None, pad_edge=False)
    for name in sorted({str(record.get("gateway")) for record in recent}):
        figures = Figures.of([one for one in recent if str(one.get("gateway")) == name], seconds)
        table.add_row(escape(printable(name)), *figures.cells)
    return table


def _waiting(seen: dict[str, Any]) -> str:
    """Who waits, in a line for each pool."""
    lines = []
    for pool in seen["pools"]:
        who = "; ".join(
            f"{line['band']} {line['tenant']} {line['requests']} for {line['oldest_s']:.1f} s"
            for line in pool["waiting"]
        )
        held = f", {pool['held_requests']} until a replica is ready" if pool["held_requests"] else ""
        lines.append(f"{pool['pool']}: {pool['waiting_requests']} waiting{held}" + (f" ({who})" if who else ""))
    return "\n".join(lines)
