"""The access log: one JSON line for each request, in the fields that people search for. Never a prompt.

A thread writes the lines, so a disk or a pipe that stands still holds up no request. If it stands still for long, lines
are dropped, and counted. A file that was renamed or removed (as logrotate does) is opened anew within a second.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
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
_LOOK_S = 1.0
"""How often to look whether the file is still the one at its path."""


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
        """`target` is a file, to which lines are appended, or `-` for stdout: see `check_target`."""
        self._target, self._dropped = target, dropped
        self._is_over = threading.Event()
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

    def end(self) -> None:
        """Write what is left, and close the file. Nobody waits for it."""
        self._is_over.set()
        with contextlib.suppress(queue.Full):  # then the thread ends when it has written these
            self._lines.put_nowait(None)

    def close(self) -> None:
        """Write what is left, for two seconds at most."""
        self.end()
        self._thread.join(_CLOSE_S)

    def _write(self) -> None:
        file = _File(self._target)
        while not (self._is_over.is_set() and self._lines.empty()):
            if (line := self._lines.get()) is None:
                break
            try:
                file.write(line)
            except OSError as error:
                self._dropped.inc()
                _log.warning("a line of the access log was not written", reason=error.strerror or str(error))
        file.close()


class _File:
    """Where lines are appended. Its methods raise OSError."""

    def __init__(self, target: str) -> None:
        self._path = None if target == STDOUT else Path(target)
        self._file: BinaryIO | None = None if self._path is not None else sys.stdout.buffer
        self._looked_s = 0.0

    def write(self, line: bytes) -> None:
        if self._path is not None and time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            self._leave_if_moved(self._path)
        if self._file is None:
            assert self._path is not None
            self._file = self._path.open("ab", buffering=0)
        self._file.write(line)
        self._file.flush()

    def _leave_if_moved(self, path: Path) -> None:
        """Somebody may have renamed the file, or put another one in its place."""
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
                    return
            self.close()

    def close(self) -> None:
        if self._path is not None and self._file is not None:
            self._file.close()
            self._file = None
