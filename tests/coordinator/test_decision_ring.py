"""The last records of requests in the store: bounded by bytes, the oldest gone first, and never in the way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from coordinator.decision_ring import LEAST_BYTES, SLOTS, DecisionRing
from coordinator.errors import StoreRefused
from coordinator.keys import decision_ring_key, decision_slot_key
from coordinator.store import Store, StoreOptions
from tests.coordinator.stage import running
from tests.redis_server import RedisServer

RECORD_BYTES, BATCH = 250, 60
ALL = [decision_slot_key("", slot) for slot in range(SLOTS)]


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[Store]:
    async with running(Store(StoreOptions(redis_server.url, budget_s=5.0), "gw0")) as store:
        yield store


@pytest.fixture
def ring(store: Store) -> DecisionRing:
    return DecisionRing(store, "")


async def keep(ring: DecisionRing, first: int, last: int, max_bytes: int = LEAST_BYTES) -> None:
    """Keeps records of these numbers, a batch at a time."""
    for start in range(first, last, BATCH):
        batch = range(start, min(start + BATCH, last))
        await ring.keep({f"team/{number:032x}": os.urandom(RECORD_BYTES) for number in batch}, max_bytes)


async def kept(client: redis.Redis, first: int, last: int) -> list[int]:
    """The numbers of these whose records are in any slot."""
    names = {name for slot in ALL for name in await client.hkeys(slot)}
    return [number for number in range(first, last) if f"team/{number:032x}" in names]


async def memory_bytes(client: redis.Redis) -> int:
    """What all slots take, measured at each field."""
    sizes = [await client.memory_usage(key, samples=0) for key in (*ALL, decision_ring_key())]
    return sum(size or 0 for size in sizes)


async def test_the_ring_never_takes_more_than_its_bytes_and_keeps_the_last_records(
    ring: DecisionRing, client: redis.Redis
) -> None:
    most = 0
    for start in range(0, 9000, 300):
        await keep(ring, start, start + 300)
        most = max(most, await memory_bytes(client))
    assert 0.75 * LEAST_BYTES < most <= LEAST_BYTES
    numbers = await kept(client, 0, 9000)
    assert numbers == list(range(numbers[0], 9000)), "the oldest go first"
    assert len(numbers) * (RECORD_BYTES + 37) > LEAST_BYTES / 2


async def test_gateways_that_go_on_to_the_next_slot_together_empty_none_that_is_fresh(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with (
        running(Store(StoreOptions(redis_server.url, budget_s=5.0), "gw0")) as one,
        running(Store(StoreOptions(redis_server.url, budget_s=5.0), "gw1")) as other,
    ):
        rings = [DecisionRing(one, ""), DecisionRing(other, "")]
        for start in range(0, 6000, 600):
            both = (keep(ring, start + at * 300, start + at * 300 + 300) for at, ring in enumerate(rings))
            await asyncio.gather(*both)
            since = max(0, start - 1200)
            assert await kept(client, since, start + 600) == list(range(since, start + 600))
        assert int((await client.hget(decision_ring_key(), "at")).split()[0]) > SLOTS


async def test_an_id_that_comes_again_has_its_last_record_and_never_another_names(ring: DecisionRing) -> None:
    await ring.keep({"team/same": b"first"}, LEAST_BYTES)
    await ring.keep({"team/same": b"second", "other/same": b"theirs"}, LEAST_BYTES)
    assert await ring.find(["team/same"]) == [b"second"]


@pytest.mark.parametrize("lost", [ALL[:1], ALL, [decision_ring_key()], [decision_ring_key(), *ALL]])
async def test_what_was_evicted_or_emptied_begins_anew_within_its_bytes(
    ring: DecisionRing, client: redis.Redis, lost: list[str]
) -> None:
    await keep(ring, 0, 3000)
    await client.delete(*lost)
    await keep(ring, 3000, 7000)
    assert await kept(client, 6000, 7000) == list(range(6000, 7000))
    assert await memory_bytes(client) <= LEAST_BYTES


async def test_garbage_in_its_keys_stops_nothing(ring: DecisionRing, client: redis.Redis) -> None:
    await client.set(decision_ring_key(), "x")
    await client.rpush(ALL[0], "x")
    await keep(ring, 0, 60)
    await keep(ring, 60, 120)
    await client.hset(decision_ring_key(), mapping={"at": "many", "0": "-5"})
    await keep(ring, 120, 240)
    assert await kept(client, 180, 240) == list(range(180, 240))


async def test_a_smaller_ring_drops_the_oldest_at_once(ring: DecisionRing, client: redis.Redis) -> None:
    await keep(ring, 0, 6000, 4 * LEAST_BYTES)
    assert await memory_bytes(client) > LEAST_BYTES
    await keep(ring, 6000, 6060, LEAST_BYTES)
    assert await memory_bytes(client) <= LEAST_BYTES
    assert await kept(client, 6000, 6060) == list(range(6000, 6060))


async def test_a_slot_gets_records_for_hours_only_and_then_expires(ring: DecisionRing, client: redis.Redis) -> None:
    await keep(ring, 0, 1)
    assert 6 * 86_400 < await client.ttl(ALL[0]) <= 7 * 86_400
    number, since_s = (await client.hget(decision_ring_key(), "at")).split()
    await client.hset(decision_ring_key(), "at", f"{number} {int(since_s) - 12 * 3600}")
    await keep(ring, 1, 2)
    await keep(ring, 2, 3)
    assert [await client.hlen(slot) for slot in ALL[:2]] == [2, 1]


async def test_a_redis_whose_memory_is_full_refuses_records_and_gets_their_memory_back(
    ring: DecisionRing, client: redis.Redis
) -> None:
    await keep(ring, 0, 600)
    used = (await client.info("memory"))["used_memory"]
    await client.config_set("maxmemory", used // 2)
    try:
        for _ in range(2):
            with pytest.raises(StoreRefused) as refused:
                await keep(ring, 600, 601)
            assert refused.value.is_full
            await ring.drop()
    finally:
        await client.config_set("maxmemory", 0)
    assert await memory_bytes(client) == 0
    await keep(ring, 601, 602)
    assert await kept(client, 600, 602) == [601]
