"""Measures for how long something holds the event loop. Meanwhile nothing else runs in this gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.02
"""Between two measurements. Whatever holds the loop for longer than this is always seen."""


async def measure_loop_lag(*observers: Callable[[float], object]) -> None:
    """Call the observers, again and again, with the seconds by which a timer came late. A timer that is set again costs
    an idle gateway less than a task that sleeps."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def begin() -> asyncio.TimerHandle:
        due_s = loop.time() + INTERVAL_S
        return loop.call_at(due_s, end, due_s)

    def end(due_s: float) -> None:
        nonlocal timer
        late_s = max(0.0, loop.time() - due_s)
        for observe in observers:
            observe(late_s)
        timer = begin()

    timer = begin()
    try:
        await loop.create_future()
    finally:
        timer.cancel()
