"""When Redis' clock is set back, breakers stay open for as long as before."""

from __future__ import annotations

from dataclasses import replace

import redis.asyncio as redis

from coordinator.pool.pool import Pool
from coordinator.scripts import BreakerKnobs, PolicyKnobs
from tests.coordinator.clock.stage import HOUR_MS, Clock
from tests.coordinator.stage import (
    KEYS,
    chain,
    drained,
    hash_of,
    place,
)

KNOBS = BreakerKnobs(failures=1, error_rate=0.0, window_ms=10_000, open_ms=2000)


async def opened(pool: Pool, clock: Clock) -> None:
    pool.report("r0", "life1", "failure", KNOBS)
    await drained(pool)
    assert await clock.left_ms(KEYS.breakers, "r0") > 0


async def why(pool: Pool, reservation: str) -> str:
    """The reason for a placement that may only use r0: `last_resort` while r0's breaker is open."""
    placement = await place(
        pool, reservation, chain(reservation), pinned="r0", knobs=PolicyKnobs(probe_ms=KNOBS.open_ms)
    )
    return placement.why


async def test_an_open_breaker_is_open_for_as_long_as_before(pool: Pool, client: redis.Redis, clock: Clock) -> None:
    await opened(pool, clock)
    await pool.beat()
    await clock.step(-HOUR_MS)
    fleet = await pool.beat()
    assert 0 < fleet.open_until_ms["r0"] - fleet.now_ms <= KNOBS.open_ms
    assert await why(pool, "a") == "last_resort"
    await clock.step(KNOBS.open_ms)
    assert await why(pool, "b") == "pinned", "it is let through as a probe"


async def test_a_breaker_that_would_be_open_for_longer_than_any_is_probed(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    await client.hset(KEYS.breakers, "r0", f"3 {await clock.now_ms() + HOUR_MS} 0")
    assert await why(pool, "a") == "pinned"
    assert await clock.left_ms(KEYS.breakers, "r0") <= KNOBS.open_ms


async def test_failures_of_the_future_leave_the_window_in_its_time(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    knobs = replace(KNOBS, failures=3)

    async def fail() -> str:
        pool.report("r0", "life1", "failure", knobs)
        await drained(pool)
        return (await hash_of(client, KEYS.breakers))["r0"]

    await fail()
    await clock.step(-HOUR_MS)
    assert (await fail()).startswith("2 0 0")
    await clock.step(knobs.window_ms)
    assert (await fail()).startswith("1 0 0"), "those before are out of the window"
