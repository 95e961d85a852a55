"""Child processes of the local cluster, and how they are stopped, by their parent or by a later `kvgate down`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

Kind = Literal["up", "gateway", "agent", "replica", "redis"]

# The order in which kinds are stopped, and when each is killed, in seconds from the start. A kind that stops early
# leaves its time to the next. Gateways need the replicas to finish their streams, and Redis to release their load;
# agents need Redis to release their replicas.
_STOP_ORDER: tuple[tuple[tuple[Kind, ...], float], ...] = (
    (("gateway",), 3.0),
    (("agent", "replica"), 4.1),
    (("redis",), 4.5),
)
_UP_STOPS_THE_OTHERS_S = 6.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Process:
    """A process. Its start time (clock ticks since boot) distinguishes it from a later process with the same pid."""

    kind: Kind
    id: str
    pid: int
    start_ticks: int
    log: Path

    def is_alive(self) -> bool:
        """Whether it runs. A zombie does not."""
        return _start_ticks(self.pid) == self.start_ticks

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the pid still belongs to this process."""
        if self.is_alive():
            os.kill(self.pid, number)


def this_process() -> Process:
    return Process("up", "up", os.getpid(), _start_ticks(os.getpid()) or 0, Path(os.devnull))


def _start_ticks(pid: int) -> int | None:
    """When the running process `pid` started (field 22 of /proc/PID/stat); None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the command's name, may hold spaces and parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


@dataclass
class Children:
    """The processes that this process started. Each leads its own session, so that Ctrl-C reaches the parent only."""

    environment: Mapping[str, str]
    die_with_parent: bool
    _inherited_fds: tuple[int, ...] = ()
    _children: list[tuple[Process, subprocess.Popen[bytes]]] = field(default_factory=list)
    _reported: set[int] = field(default_factory=set)

    @property
    def processes(self) -> list[Process]:
        return [process for process, _ in self._children]

    def inherit(self, fds: Iterable[int]) -> None:
        """Keep `fds` open in every child that starts from now on."""
        self._inherited_fds = tuple(fds)

    def start(
        self, kind: Kind, name: str, command: Sequence[str], log: Path, secrets: Mapping[str, str] | None = None
    ) -> Process:
        """Start `command` and write its output to `log`, which is emptied first. `secrets` are added to its
        environment, where other users cannot see them."""
        if self.die_with_parent:
            command = [sys.executable, "-P", "-m", "gateway.ops.local.bound_process", str(os.getpid()), *command]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self.environment, **(secrets or {})},
                pass_fds=self._inherited_fds,
                start_new_session=True,
            )
        # A child that has exited already has no ticks; no later process under its pid will match -1.
        process = Process(kind, name, child.pid, _start_ticks(child.pid) or -1, log)
        self._children.append((process, child))
        return process

    def newly_exited(self) -> list[tuple[Process, int]]:
        """The children that exited since the last call, with their exit codes (negative: killed by a signal)."""
        exited = []
        for process, child in self._children:
            if process.pid not in self._reported and (code := child.poll()) is not None:
                self._reported.add(process.pid)
                exited.append((process, code))
        return exited


@dataclass(frozen=True)
class Stopped:
    """How many processes ran (without `up` itself), and which of them had to be killed."""

    running: int
    killed: list[Process]

    def __str__(self) -> str:
        late = f", had to kill {', '.join(process.id for process in self.killed)}" if self.killed else ""
        return f"stopped {self.running} process{'' if self.running == 1 else 'es'}{late}"


async def stop(processes: Iterable[Process]) -> Stopped:
    """Stop all running `processes` in order, within 5 s. An `up` among them first gets time to do so itself."""
    processes = [process for process in processes if process.is_alive()]
    killed = await _end([process for process in processes if process.kind == "up"], _UP_STOPS_THE_OTHERS_S)
    started = time.monotonic()
    for kinds, deadline_s in _STOP_ORDER:
        group = [process for process in processes if process.kind in kinds]
        killed += await _end(group, started + deadline_s - time.monotonic())
    await wait_until(partial(_all_gone, processes), 0.3)
    return Stopped(sum(process.kind != "up" for process in processes), killed)


async def _end(group: list[Process], patience_s: float) -> list[Process]:
    """Ask a group to stop. Kill and return the processes that still run after `patience_s`."""
    for process in group:
        process.signal(signal.SIGTERM)
    if await wait_until(partial(_all_gone, group), patience_s):
        return []
    late = [process for process in group if process.is_alive()]
    for process in late:
        process.signal(signal.SIGKILL)
    return late


def _all_gone(processes: Iterable[Process]) -> bool:
    return not any(process.is_alive() for process in processes)


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `condition` holds; False if it does not hold within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log file, for an error message."""
    try:
        text = log.read_text(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"
