"""Kills the processes that a test run leaves behind when it is killed in the middle of its fixtures.

python -P tests/leftovers.py RUN    waits until its stdin ends: then the test run has ended
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

_VARIABLE = "KVGATE_TEST_RUN"
"""An environment variable of every process that the run starts, directly or indirectly."""


def watch_this_run() -> None:
    """Starts the cleanup process, which outlives this run."""
    if not Path("/proc/self/environ").exists():
        return
    os.environ[_VARIABLE] = uuid.uuid4().hex
    command = [sys.executable, "-P", __file__, os.environ[_VARIABLE]]
    _watchers.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))


_watchers: list[subprocess.Popen[bytes]] = []
"""Keeps the cleanup processes alive: their stdin ends when they are freed."""


def _of_run(run: str) -> list[int]:
    mark = f"{_VARIABLE}={run}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
            except OSError:  # the process has ended, or belongs to another user
                continue
    return found


def main() -> None:
    sys.stdin.read()
    while pids := _of_run(sys.argv[1]):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    main()
