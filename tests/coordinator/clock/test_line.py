"""A queue keeps its order when Redis' clock goes back."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.pool.pool import Pool
from tests.coordinator.clock.stage import HOUR_MS, Clock
from tests.coordinator.queueing import asking, fill, queued
from tests.polling import eventually


async def test_who_comes_after_a_step_back_stands_behind_those_who_came_before(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    """Else nobody who waits then would get a turn as long as others come."""
    await clock.step(HOUR_MS)
    await pool.beat()
    ended = await fill(pool, 2)
    names, order = ["first", "second", "third", "fourth"], []
    for name in names:
        if name == "third":
            await clock.step(-HOUR_MS)
        task = await queued(client, pool, asking(name))
        task.add_done_callback(lambda _, name=name: order.append(name))
    for count in range(1, len(names) + 1):
        pool.done(ended.pop(0))
        await eventually(lambda count=count: len(order) == count)
        ended.append(order[-1])
    assert order == names
