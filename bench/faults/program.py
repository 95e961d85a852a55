"""A process that can be killed, stopped, frozen, slowed and started again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_ENDS_WITHIN_S = 40.0
"""Longer than a gateway's grace."""
STOPPED_S, RUNNING_S = 0.4, 0.1
"""A slow process stands and runs for these times in turn. It gets a fifth of a core's time, in slices that are far
apart."""


class Program:
    """It does not run until `start`. Its output goes to `log`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """0 before it is started."""
        return self._process.pid if self._process is not None else 0

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Raises OSError if it cannot be started."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=subprocess.STDOUT)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        """Sends SIGKILL and waits until it is gone."""
        self._signal(signal.SIGKILL)
        await self._gone()

    async def stop(self) -> None:
        """Sends SIGTERM and waits until it is gone. Raises TimeoutError if it does not end."""
        self._signal(signal.SIGTERM)
        await self._gone()

    async def slow(self, for_s: float) -> None:
        """Makes it stand still four fifths of the time."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + for_s
        try:
            while loop.time() < until_s:
                self.freeze()
                await asyncio.sleep(STOPPED_S)
                self.thaw()
                await asyncio.sleep(RUNNING_S)
        finally:
            self.thaw()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    async def _gone(self) -> None:
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, _ENDS_WITHIN_S)
            except subprocess.TimeoutExpired as error:
                raise TimeoutError(f"{self.name} has not ended within {_ENDS_WITHIN_S:g} s") from error


async def end_all(programs: Sequence[Program]) -> None:
    """Ends all of them, in whatever state they are."""
    for program in programs:
        program.thaw()
    with suppress(TimeoutError):
        await asyncio.gather(*(program.kill() for program in programs))
