"""Kills the processes that a run of the tests leaves behind when it is killed in the middle of its fixtures.

python -P tests/leftovers.py RUN    waits until its stdin ends, which is when the run of the tests has ended
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

_VARIABLE = "KVGATE_TEST_RUN"
"""A variable in the environment of every process that the run starts, directly or not."""


def watch_this_run() -> None:
    """Starts the process that outlives this run. xdist's workers belong to the run that started them."""
    if "PYTEST_XDIST_WORKER" in os.environ or not Path("/proc/self/environ").exists():
        return
    os.environ[_VARIABLE] = uuid.uuid4().hex
    command = [sys.executable, "-P", __file__, os.environ[_VARIABLE]]
    _watchers.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))


_watchers: list[subprocess.Popen[bytes]] = []
"""Kept alive here: their stdin ends when they are freed."""


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
