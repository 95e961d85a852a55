"""Waits until LMCache has stored what a replica has computed."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio as redis

from coordinator.pool.pool import Pool
from coordinator.pool.stored_chunks import until_stored
from coordinator.registry import ReplicaRecord
from tests.coordinator.stage import KEYS, chain

CHAIN = chain(1, 2, 3)
LIFE = ReplicaRecord("r0", "life1", "ready", 1000, 0, "http://r0", floor=5)


async def holds(client: redis.Redis, kind: str = "resident", life: str = "life1", entry: str = "9") -> None:
    """The record of the replica for the last key."""
    await client.hset(KEYS.own(CHAIN[-1]), "r0", f"{life} {kind} gpu 8 0 0 {entry}")


async def named(client: redis.Redis) -> None:
    """An agent has named a chunk of the second key, and one of the third."""
    for number in (1, 2):
        await client.set(KEYS.chunk(CHAIN[number]), f"8 chunk {number}", ex=60)


async def goes_on(waiting: asyncio.Task[bool]) -> bool:
    """Whether it waits, after it has looked once more at least."""
    await asyncio.sleep(0.12)
    return not waiting.done()


@pytest.mark.parametrize(
    "other", [{"kind": "claim"}, {"life": "life2"}, {"entry": "4"}], ids=["a claim", "another life", "a void record"]
)
async def test_it_waits_until_the_replica_holds_the_prompt_and_its_chunks_are_there(
    pool: Pool, client: redis.Redis, other: dict[str, str]
) -> None:
    await holds(client, **other)
    waiting = asyncio.ensure_future(until_stored(pool, CHAIN, 0, LIFE))
    assert await goes_on(waiting)
    await named(client)
    await holds(client)
    assert await goes_on(waiting)
    await client.set("chunk 2", "kv")
    assert await goes_on(waiting), "LMCache may store the last one first"
    await client.set("chunk 1", "kv")
    assert await waiting
    await client.delete("chunk 1", "chunk 2")


async def test_there_is_nothing_to_wait_for_where_an_old_chunk_is_gone_or_none_has_a_name(
    pool: Pool, client: redis.Redis
) -> None:
    await holds(client)
    assert await until_stored(pool, CHAIN, 0, LIFE)
    await named(client)
    await client.set("chunk 2", "kv")
    assert not await until_stored(pool, CHAIN, 2, LIFE)
    await client.delete("chunk 2")
