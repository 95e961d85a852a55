"""The circuit breaker of a replica. All gateways share it."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.breaker import FAILURES, OPEN_MS, WINDOW_MS
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, chain, drained, hash_of, joined, now_ms, place, register
from tests.redis_server import RedisServer


async def reported(
    pool: Pool,
    client: redis.Redis,
    outcome: str = "failure",
    incarnation: str = "life1",
    successes: int = 0,
) -> str | None:
    """The breaker's record after a report."""
    pool.report("r0", incarnation, outcome, successes)
    await drained(pool)
    return (await hash_of(client, KEYS.breakers)).get("r0")


async def is_open(client: redis.Redis) -> bool:
    return (await hash_of(client, KEYS.breakers))["r0"].split(" ")[1] != "0"


async def opened(pool: Pool, client: redis.Redis) -> str:
    """Reports failures until the breaker is open, and returns its record."""
    for _ in range(FAILURES):
        record = await reported(pool, client)
    assert record is not None
    assert await is_open(client)
    return record


async def probe(pool: Pool, client: redis.Redis, reservation: str) -> None:
    """Lets the time of the next probe come, and sends the probe."""
    failures = (await hash_of(client, KEYS.breakers))["r0"].split(" ")[0]
    await client.hset(KEYS.breakers, "r0", f"{failures} {await now_ms(client) - 1} 0")
    await place(pool, reservation, chain(reservation))


async def age(client: redis.Redis, ms: int) -> None:
    """Moves the counts of a closed breaker so much into the past."""
    *head, window = (await hash_of(client, KEYS.breakers))["r0"].split(" ", 3)
    slices = [each.split(":") for each in window.split(" ")]
    moved = [f"{int(since) - ms}:{failures}:{successes}" for since, failures, successes in slices]
    await client.hset(KEYS.breakers, "r0", " ".join([*head, *moved]))


async def test_a_breaker_opens_at_the_threshold(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    for count in ("1", "2"):
        closed = await reported(pool, client)
        assert closed is not None
        assert closed.split(" ")[:3] == [count, "0", "0"]
    before = await now_ms(client)
    failures, open_until_ms, probing = (await opened(pool, client)).split(" ")
    assert (failures, probing) == ("3", "0")
    assert before + OPEN_MS <= int(open_until_ms) <= await now_ms(client) + OPEN_MS


async def test_failures_that_are_few_among_many_attempts_open_no_breaker(pool: Pool, client: redis.Redis) -> None:
    """The threshold is the minimum number of failures. Above it, the share of failures among all attempts decides."""
    await register(pool, 1)
    await reported(pool, client, successes=6)
    for _ in range(4):
        await reported(pool, client)
        assert not await is_open(client), "five of eleven are less than half"
    await reported(pool, client)
    assert await is_open(client)


async def test_every_gateway_tells_of_attempts_that_ended_well(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    await register(pool, 1)
    async with joined(redis_server.url, "gw1") as other:
        for teller in (pool, other, pool):
            await reported(teller, client, successes=2)
        assert not await is_open(client), "three of nine"


async def test_what_is_older_than_the_window_counts_no_more(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    for _ in range(FAILURES - 1):
        await reported(pool, client)
    await age(client, WINDOW_MS)
    for _ in range(FAILURES - 1):
        await reported(pool, client, successes=100)
        assert not await is_open(client)
    await age(client, WINDOW_MS)
    await opened(pool, client)


async def test_a_window_stays_short_however_long_a_replica_fails_now_and_then(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    for _ in range(40):
        record = await reported(pool, client, successes=1000)
        assert record is not None
        assert len(record.split(" ")) <= 3 + 6
        await age(client, WINDOW_MS // 10)


async def test_a_successful_probe_closes_it(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await opened(pool, client)
    await probe(pool, client, "probe")
    assert await reported(pool, client, "success") is None
    assert str(await reported(pool, client)).startswith("1 0 0 ")


async def test_requests_that_were_under_way_when_it_opened_neither_close_it_nor_open_it_further(
    pool: Pool, client: redis.Redis
) -> None:
    """A crash fails all requests in flight at once: that is one event, not twenty failed probes. If a replica fails
    half of its requests, the other half succeed."""
    await register(pool, 1)
    record = await opened(pool, client)
    for outcome in ("failure", "success") * 10:
        assert await reported(pool, client, outcome) == record


async def test_each_failed_probe_doubles_the_time_it_stays_open_up_to_twelve_times(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await opened(pool, client)
    open_for = []
    for i in range(6):
        await probe(pool, client, f"probe{i}")
        before = await now_ms(client)
        again = await reported(pool, client)
        assert again is not None
        open_for.append(int(again.split(" ")[1]) - before)
    assert [round(ms / OPEN_MS) for ms in open_for] == [2, 4, 8, 12, 12, 12]


async def test_a_former_lifes_outcome_says_nothing_about_this_one(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1, incarnation="life2")
    assert await reported(pool, client, "failure", "life1") is None
    await reported(pool, client, "failure", "life2")
    assert str(await reported(pool, client, "success", "life1")).startswith("1 0 0 ")


async def test_an_unknown_replicas_outcome_writes_nothing(pool: Pool, client: redis.Redis) -> None:
    assert await reported(pool, client, "failure") is None
