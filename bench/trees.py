"""Process trees: the descendants of processes, their memory and their CPU time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_CPU_CLOCK = 2
"""CPUCLOCK_SCHED. With a process' number in the higher bits, it is that process' CPU clock (man
clock_getcpuclockid)."""


def tree(roots: Iterable[int]) -> set[int]:
    """The processes and all their descendants."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (stat := _stat(int(folder.name))):
            parents[int(folder.name)] = int(stat[1])
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def rss_bytes(pid: int) -> int:
    """A process' memory. 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def cpu_s(roots: Iterable[int]) -> float:
    """User and system time of the process trees until now. It comes from each process' own clock: /proc counts in ticks
    of 10 ms, which at a low rate is as much as many requests take."""
    total = 0.0
    for pid in tree(roots):
        with suppress(OSError):  # the process is gone
            total += time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    return total


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name: state, parent, … Empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
