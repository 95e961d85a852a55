"""How long the event loop is held: everything that a gateway does waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.02
"""Between two looks: what holds the loop for longer than this is seen every time."""


async def watch_loop(observe: Callable[[float], object]) -> None:
    """Tell `observe`, again and again, by how many seconds a timer came late."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        observe(max(0.0, loop.time() - due_s))
