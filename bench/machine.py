"""The machine that a measurement is made on."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from functools import cache
from pathlib import Path

from bench.interpreter import is_optimised

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""The unit of times in /proc."""


@cache
def machine() -> dict[str, str]:
    """The machine and the versions of a measurement, as they were at the first call."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "processor": processor,
        "cores": str(os.cpu_count()),
        "python": f"{platform.python_version()} ({'optimised' if is_optimised() else 'not optimised'})",
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit of the measured code. It is marked if files other than results differ from it. Empty if it is
    unknown."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit}-dirty" if changes else commit


def _git(*arguments: str) -> str:
    root = Path(__file__).parents[1]
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def _idle_s() -> float:
    """Idle time of all processors since boot."""
    stat = Path("/proc/stat").read_text().splitlines()[0].split()
    return (int(stat[4]) + int(stat[5])) * TICK_S


class IdleShare:
    """The share of processor time that was idle since this object was made."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._idle_s = _idle_s()

    def __call__(self) -> float:
        wall_s = max(1e-9, time.perf_counter() - self._started_s)
        return (_idle_s() - self._idle_s) / wall_s / (os.cpu_count() or 1)
