"""Placements carry a deadline in Redis' time. A step of Redis' clock costs no placement."""

from __future__ import annotations

import pytest

from coordinator.pool.pool import Pool
from tests.coordinator.clock.stage import HOUR_MS, Clock
from tests.coordinator.stage import chain, place


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
async def test_placements_between_a_step_of_the_clock_and_the_next_heartbeat_are_made(
    pool: Pool, clock: Clock, step_ms: int
) -> None:
    await clock.step(step_ms)
    for number in range(3):
        await place(pool, f"id{number}", chain(number))
    await pool.beat()
    await place(pool, "after", chain(1))
