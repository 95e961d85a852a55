"""The common part of every benchmark's command: it ends cleanly on a signal, and writes its results with the command
that repeats them."""

from __future__ import annotations

import atexit
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

from bench.interpreter import is_optimised
from bench.machine import machine
from bench.streams import STREAMS

_SLOW_PYTHON = (
    "warning: this Python was built without optimisation, so gateways cost a third more here than with Debian's Python "
    "or that of the official images; make install PYTHON=/usr/bin/python3 installs with another one"
)


def begin() -> None:
    """Makes SIGTERM unwind like Ctrl-C, so that every started process is stopped. Reads the commit now, because results
    come hours later and files may change meanwhile. Warns of a slow Python. The last line tells of the streams."""
    machine()
    STREAMS.ask()
    atexit.register(STREAMS.show)
    if not is_optimised():
        print(_SLOW_PYTHON, file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def command() -> str:
    """The command line of this run."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def write(out: Path | None, rows: Sequence[dict[str, Any]], versions: dict[str, str], **facts: Any) -> None:
    """Writes the rows as JSON, one a line, after the machine, the versions and the command. Does nothing without
    `out`."""
    if out is None:
        return
    told = {"machine": machine(), "versions": versions, "command": command(), "streams": STREAMS.as_dict()}
    head = orjson.dumps({**told, **facts})
    lines = b",\n".join(orjson.dumps(row) for row in rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(head.removesuffix(b"}") + b',"rows":[\n' + lines + b"\n]}\n")


def progress(console: Console) -> Progress:
    """Shows the current measurement, the finished share, and the remaining time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


class Row(Protocol):
    """One measurement, as it is written."""

    def as_dict(self) -> dict[str, Any]: ...


_Row = TypeVar("_Row", bound=Row)


@dataclass
class Found(Generic[_Row]):
    """The measurements so far, the measured versions, and the measurements that were left out."""

    versions: dict[str, str]
    out: Path | None
    console: Console
    rows: list[_Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Each with its reason."""
    facts: dict[str, Any] = field(default_factory=dict)
    """More about the whole run."""

    def leave_out(self, why: str) -> None:
        self.left_out.append(why)
        self.console.print(f"left out: {why}")

    def save(self) -> None:
        write(self.out, [row.as_dict() for row in self.rows], self.versions, **self.facts, left_out=self.left_out)
