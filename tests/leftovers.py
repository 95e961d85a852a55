"""Kills what a run of the tests leaves running when it is killed or interrupted, in the middle of its fixtures.

python -P tests/leftovers.py RUN    waits until its stdin ends: the run holds the other end, and nobody else
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

_VARIABLE = "KVGATE_TEST_RUN"
"""In the environment of all processes that the run starts, directly or not."""


def watch_this_run() -> None:
    """Start the process that outlives this one. A worker of xdist belongs to the run that started it."""
    if "PYTEST_XDIST_WORKER" in os.environ or not Path("/proc/self/environ").exists():
        return
    os.environ[_VARIABLE] = uuid.uuid4().hex
    command = [sys.executable, "-P", __file__, os.environ[_VARIABLE]]
    _watchers.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))


_watchers: list[subprocess.Popen[bytes]] = []
"""Kept, because their stdin ends with them."""


def _of_run(run: str) -> list[int]:
    mark = f"{_VARIABLE}={run}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
            except OSError:  # it has ended, or is another user's
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
