"""Whether residency is still the engine's latest report when an answer contradicts it."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.pool.engine_feedback import is_unchanged
from coordinator.pool.pool import Pool
from tests.coordinator.stage import chain
from tests.coordinator.stream import Stream, followed, gains, losses


async def test_residency_is_unchanged_until_its_engine_tells_of_the_key_again(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    [key] = chain(1)
    await followed(client)
    await pool.beat()
    assert not await is_unchanged(pool, "r0", key, "1")
    await stream.say(*gains([key]))
    assert await is_unchanged(pool, "r0", key, "1")
    assert not await is_unchanged(pool, "r1", key, "1")
    await stream.say(*losses([key]), *gains([key]))
    assert not await is_unchanged(pool, "r0", key, "1")


async def test_nothing_is_known_to_be_unchanged_while_nobody_would_tell(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    await followed(client)
    await stream.say(*gains(chain(1)))
    await followed(client, lease_ms=-1)
    await pool.beat()
    assert not await is_unchanged(pool, "r0", chain(1)[0], "1")
