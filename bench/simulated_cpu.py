"""A process on a simulated CPU: Valgrind's Callgrind counts its instructions and its cache misses. Nothing else that
runs on the machine changes them. The process runs some 50 times as slow."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_L1_MISS_CYCLES, _LAST_MISS_CYCLES = 10, 100
_LAST_LEVEL = "1048576,16,64"
"""The size of the last cache in bytes, its ways, and the bytes of a line: 1 MiB, as much as a core has to itself."""
_EVENTS = re.compile(r"^events: (.*)$", re.MULTILINE)
_TOTALS = re.compile(r"^totals: (.*)$", re.MULTILINE)
_ANSWER_S = 60


class NoValgrind(Exception):
    """It is not installed. Its text says how to change that."""


@dataclass(frozen=True)
class Counts:
    """What a process did."""

    instructions: int
    l1_misses: int
    last_misses: int
    """Of the last level of caches."""

    @property
    def cycles(self) -> int:
        """An estimate, by KCachegrind's formula."""
        return self.instructions + _L1_MISS_CYCLES * self.l1_misses + _LAST_MISS_CYCLES * self.last_misses

    @classmethod
    def of_dump(cls, dump: str) -> Counts:
        """The sums in a file that Callgrind wrote."""
        events, totals = _EVENTS.search(dump), _TOTALS.search(dump)
        if events is None or totals is None:
            raise ValueError("Callgrind wrote no sums")
        of = dict(zip(events[1].split(), map(int, totals[1].split()), strict=False))  # zeros at the end are left out
        return cls(of["Ir"], _sum(of, "I1mr", "D1mr", "D1mw"), _sum(of, "ILmr", "DLmr", "DLmw"))


class SimulatedCpu:
    """Runs one process: put `command` before its own, call `begin` once it has started, and then `take`. The process
    may replace itself by another program, as `env` does. Its files are in `folder`. Raises NoValgrind."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("callgrind_control") is None:
            raise NoValgrind("this needs Valgrind: apt install valgrind")
        self._out = folder / "callgrind"
        self._dumps = 0
        self.command = (
            *("valgrind", "--tool=callgrind", "--instr-atstart=no", "--cache-sim=yes", "--trace-children=yes"),
            *(f"--LL={_LAST_LEVEL}", f"--callgrind-out-file={self._out}"),
        )

    def begin(self, pid: int) -> None:
        """Count from now on."""
        _control("--instr=on", pid)

    def take(self, pid: int) -> Counts:
        """What the process did since the last call, or since `begin`."""
        _control("--dump", pid)
        self._dumps += 1
        dump = self._out.with_name(f"{self._out.name}.{self._dumps}")
        counts = Counts.of_dump(dump.read_text())
        dump.unlink()
        return counts


def _sum(of: dict[str, int], *names: str) -> int:
    return sum(of.get(name, 0) for name in names)


def _control(option: str, pid: int) -> None:
    """Raises RuntimeError if the process does not do it. The program ends with 0 in any case."""
    said = subprocess.run(
        ["callgrind_control", option, str(pid)], capture_output=True, check=True, text=True, timeout=_ANSWER_S
    ).stdout
    if "OK." not in said:
        raise RuntimeError(f"callgrind_control {option} {pid}: {said.strip()}")
