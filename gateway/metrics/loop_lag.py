"""Measures for how long something holds the event loop. Meanwhile nothing else runs in this gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.02
"""Between two measurements. Whatever holds the loop for longer than this is always seen."""


async def measure_loop_lag(*observers: Callable[[float], object]) -> None:
    """Call the observers, again and again, with the seconds by which a timer came late."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        late_s = max(0.0, loop.time() - due_s)
        for observe in observers:
            observe(late_s)
