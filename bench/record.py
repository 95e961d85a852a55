"""What every benchmark's command does: it ends as it is told to, and writes what it found and how to find it again."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

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
