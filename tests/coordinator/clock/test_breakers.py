"""When Redis' clock is set back, breakers stay open for as long as before."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.breaker import FAILURES, OPEN_MS, WINDOW_MS
from coordinator.pool.pool import Pool
from tests.coordinator.clock.stage import HOUR_MS, Clock
from tests.coordinator.stage import (
    KEYS,
    chain,
    drained,
    hash_of,
    place,
)


async def opened(pool: Pool, clock: Clock) -> None:
    for _ in range(FAILURES):
        pool.report("r0", "life1", "failure")
    await drained(pool)
    assert await clock.left_ms(KEYS.breakers, "r0") > 0


async def why(pool: Pool, reservation: str) -> str:
    """The reason for a placement that may only use r0: `last_resort` while r0's breaker is open."""
    return (await place(pool, reservation, chain(reservation), pinned="r0")).why


async def test_an_open_breaker_is_open_for_as_long_as_before(pool: Pool, client: redis.Redis, clock: Clock) -> None:
    await opened(pool, clock)
    await pool.beat()
    await clock.step(-HOUR_MS)
    fleet = await pool.beat()
    assert 0 < fleet.open_until_ms["r0"] - fleet.now_ms <= OPEN_MS
    assert await why(pool, "a") == "last_resort"
    await clock.step(OPEN_MS)
    assert await why(pool, "b") == "pinned", "it is let through as a probe"


async def test_a_breaker_that_would_be_open_for_longer_than_any_is_probed(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    await client.hset(KEYS.breakers, "r0", f"3 {await clock.now_ms() + HOUR_MS} 0")
    assert await why(pool, "a") == "pinned"
    assert await clock.left_ms(KEYS.breakers, "r0") <= OPEN_MS


async def test_failures_of_the_future_leave_the_window_in_its_time(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    async def fail() -> str:
        pool.report("r0", "life1", "failure")
        await drained(pool)
        return (await hash_of(client, KEYS.breakers))["r0"]

    await fail()
    await clock.step(-HOUR_MS)
    assert (await fail()).startswith("2 0 0")
    await clock.step(WINDOW_MS)
    assert (await fail()).startswith("1 0 0"), "those before are out of the window"
