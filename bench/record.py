"""What every benchmark's command does: it ends as it is told to, and writes what it found and how to find it again."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.machine import machine


def begin() -> None:
    """SIGTERM unwinds like Ctrl-C does, so that what was started is stopped. The commit is asked for now: results come
    hours later, and files change meanwhile."""
    machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def command() -> str:
    """How this was called."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def write(out: Path | None, rows: Sequence[dict[str, Any]], versions: dict[str, str], **facts: Any) -> None:
    """The rows as JSON, one a line, behind what they were measured on and of, and by which command. Nothing without
    `out`."""
    if out is None:
        return
    head = orjson.dumps({"machine": machine(), "versions": versions, "command": command(), **facts})
    lines = b",\n".join(orjson.dumps(row) for row in rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(head.removesuffix(b"}") + b',"rows":[\n' + lines + b"\n]}\n")


def progress(console: Console) -> Progress:
    """Shows what is measured now, how much of all is done, and how long the rest takes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


class Row(Protocol):
    """One measurement, as it is written."""

    def as_dict(self) -> dict[str, Any]: ...


_Row = TypeVar("_Row", bound=Row)


@dataclass
class Found(Generic[_Row]):
    """What was measured so far, of which versions, and what could not be."""

    versions: dict[str, str]
    out: Path | None
    console: Console
    rows: list[_Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Each with the reason."""

    def leave_out(self, why: str) -> None:
        self.left_out.append(why)
        self.console.print(f"left out: {why}")

    def save(self) -> None:
        write(self.out, [row.as_dict() for row in self.rows], self.versions, left_out=self.left_out)
