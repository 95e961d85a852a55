"""Claims that no gateway withdraws: the worker removes them from a replica whose agent knows all its blocks."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from coordinator.maintenance import held_keys
from coordinator.maintenance.worker import Worker
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, chain, drained, joined, numbers, owners, place, request
from tests.coordinator.stream import Stream, followed
from tests.redis_server import RedisServer


@pytest.fixture(autouse=True)
def every_claim_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every claim counts as old enough for events to have confirmed it."""
    monkeypatch.setattr(held_keys, "UNCONFIRMED_MS", -60_000)


async def answered(pool: Pool, reservation: str, keys: list[str]) -> None:
    """A finished request on r0."""
    assert await pool.place(request(reservation, keys, pinned="r0")) is not None
    pool.done(reservation)
    await drained(pool)


async def claimed(client: redis.Redis, keys: list[str]) -> list[bool]:
    return [(await owners(client, key)).get("r0", ["", ""])[1] == "claim" for key in keys]


async def test_what_an_engine_had_beyond_what_was_known_is_believed_until_its_agent_knows_everything(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    maintenance = Worker(pool)
    await followed(client, relearning=1)
    await answered(pool, "a", chain(1, 2))
    await maintenance.tick()
    assert await claimed(client, chain(1, 2)) == [True, True]
    await followed(client)
    await maintenance.tick()
    assert await claimed(client, chain(1, 2)) == [False, False]
    assert await numbers(client, KEYS.owned_tokens) == {}
    assert await client.zcard(KEYS.held("r0")) == 0


async def test_what_was_claimed_while_nobody_told_goes_when_an_agent_that_knows_everything_does_not_confirm_it(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    maintenance = Worker(pool)
    await followed(client)
    await maintenance.tick()
    await followed(client, lease_ms=-held_keys.AGENT_RETURNS_MS - 1)
    await answered(pool, "a", chain(1, 2))
    await maintenance.tick()
    assert await claimed(client, chain(1, 2)) == [True, True]
    await followed(client)
    await maintenance.tick()
    assert await claimed(client, chain(1, 2)) == [False, False]


async def test_the_claims_of_a_request_that_any_gateway_has_in_flight_stay(
    stream: Stream, pool: Pool, redis_server: RedisServer, client: redis.Redis
) -> None:
    await followed(client)
    async with joined(redis_server.url, "gw1") as other:
        await place(other, "waiting", chain("waiting"), pinned="r0")
        await place(pool, "waiting too", chain("waiting too"), pinned="r0")
        await answered(pool, "over", chain("over"))
        maintenance = Worker(pool)
        await maintenance.tick()
        while not maintenance.is_idle:  # a busy machine ends a round before its work is done
            await maintenance.tick()
        assert await claimed(client, chain("waiting")) == [True]
        assert await claimed(client, chain("waiting too")) == [True]
        assert await claimed(client, chain("over")) == [False]
        assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
