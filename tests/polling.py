"""Waits for a condition: checks it again and again until it is true.

A deadline ends a test whose condition never becomes true. It counts only the time in which the processes had cores
to run on, so a test can use a promised limit as its deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

PATIENCE_S = 30.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.005, 0.1
"""Most conditions ask several processes by HTTP: looking more often takes CPU from what is waited for."""


class Patience:
    """A deadline that counts time more slowly while the machine is busy."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._spent_s = 0.0
        self._looked_at_s = time.monotonic()

    def is_over(self) -> bool:
        now_s = time.monotonic()
        self._spent_s += (now_s - self._looked_at_s) * _share_of_a_core()
        self._looked_at_s = now_s
        return self._spent_s > self.within_s


def _share_of_a_core() -> float:
    """The share of a core, at most 1, that each runnable process has now. Linux counts the runnable processes."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return 1.0
    return min(1.0, len(os.sched_getaffinity(0)) / max(1, running))


async def eventually(condition: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """Returns the first true value of `condition`, which may be async. At the deadline, fails with the last value."""
    patience, poll_s = Patience(within_s), _FIRST_POLL_S
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert not patience.is_over(), f"still {value!r} after {within_s:g} s"
        await asyncio.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def wait_until(condition: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """`eventually`, for fixtures and tests that are not coroutines."""
    patience, poll_s = Patience(within_s), _FIRST_POLL_S
    while not (value := condition()):
        assert not patience.is_over(), f"still {value!r} after {within_s:g} s"
        Event().wait(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
    return value
