"""The reported lag of the event loop is as long as the block that caused it."""

from __future__ import annotations

import asyncio

from gateway.metrics.loop_lag import INTERVAL_S, measure_loop_lag

HELD_S = 10 * INTERVAL_S


async def test_a_loop_that_was_held_is_told_for_how_long() -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Queue[float]()

    def hold() -> None:
        until_s = loop.time() + HELD_S
        while loop.time() < until_s:
            pass

    watching = asyncio.ensure_future(measure_loop_lag(told.put_nowait))
    await told.get()
    loop.call_soon(hold)
    while await told.get() < HELD_S - INTERVAL_S:
        pass
    watching.cancel()
