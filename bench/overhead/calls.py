"""Counts the system calls of processes, with strace."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

INSTALL = "" if shutil.which("strace") else "apt install strace"
"""How to get it; empty if it is there."""


class Calls:
    """`count` is known at the end."""

    count = 0


@contextmanager
def counted_calls(pids: Sequence[int]) -> Iterator[Calls]:
    """Counts those of these processes, of their threads and of the processes that they start. They run several times
    slower meanwhile."""
    calls = Calls()
    with tempfile.NamedTemporaryFile("r") as table:
        command = ["strace", "--follow-forks", "--summary-only", "--output", table.name]
        attached = [f"--attach={pid}" for pid in pids]
        strace = subprocess.Popen([*command, *attached], stderr=subprocess.PIPE, text=True)
        try:
            assert strace.stderr is not None
            for _ in pids:
                strace.stderr.readline()  # it says of each that it is attached
            yield calls
        finally:
            strace.send_signal(signal.SIGINT)
            said = strace.communicate()[1]
        if not (told := table.read()):
            raise SystemExit(f"--calls: strace told nothing; it needs to be allowed to attach ({said.strip()})")
        calls.count = total_of(told)


def total_of(table: str) -> int:
    """The calls in strace's table: its last line has the time's share, seconds, usecs/call, calls, maybe errors."""
    return int(table.splitlines()[-1].split()[3])
