"""The access log: one JSON line for each request, in the fields that people search for. Never a prompt.

A thread writes the lines, so a disk or a pipe that stands still holds up no request. If it stands still for long, lines
are dropped, and counted.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import structlog

from gateway.metrics.fast_counters import FastCounter

_log = structlog.get_logger("kvgate.access")

STDOUT = "-"
_MOST_WAITING = 10_000
"""Lines; some 5 MB."""
_CLOSE_S = 2.0


class CannotWrite(Exception):
    """The file of the access log cannot be opened."""


def check_target(target: str | None) -> None:
    """Raises CannotWrite if lines cannot be appended there."""
    if target is not None and target != STDOUT:
        try:
            Path(target).open("ab").close()
        except OSError as error:
            raise CannotWrite(f"log.access_log: cannot append to {target!r}: {error.strerror or error}") from None


class AccessLog:
    """Call it with the record of each request: see relay/request_record.py."""

    def __init__(self, target: str, dropped: FastCounter) -> None:
        """`target` is a file, to which lines are appended, or `-` for stdout. Raises OSError."""
        self._file: BinaryIO = sys.stdout.buffer if target == STDOUT else Path(target).open("ab", buffering=0)  # noqa: SIM115
        self._dropped = dropped
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._write, name="access log", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<AccessLog {self._lines.qsize()} lines to write>"

    def __call__(self, record: dict[str, Any]) -> None:
        try:
            self._lines.put_nowait(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        except queue.Full:
            self._dropped.inc()

    def close(self) -> None:
        """Write what is left, for two seconds at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._file.write(line)
                self._file.flush()
            except OSError as error:
                self._dropped.inc()
                _log.warning("a line of the access log was not written", reason=error.strerror or str(error))
        if self._file is not sys.stdout.buffer:
            self._file.close()
