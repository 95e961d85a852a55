"""Whether LMCache has stored what a replica has computed."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.pool.pool import Pool
from coordinator.pool.stored_chunks import are_stored
from tests.coordinator.stage import KEYS, chain

CHAIN = chain(1, 2, 3)
RECORD = "life1 {kind} gpu 8 0 0 000000000000000a"


async def test_a_prompt_is_stored_when_its_replica_holds_all_of_it_and_redis_all_its_named_chunks(
    pool: Pool, client: redis.Redis
) -> None:
    async def holds(kind: str) -> None:
        await client.hset(KEYS.own(CHAIN[-1]), "r0", RECORD.format(kind=kind))

    async def is_stored(incarnation: str = "life1") -> bool:
        return await are_stored(pool, CHAIN, "r0", incarnation)

    assert not await is_stored()
    await holds("claim")
    assert not await is_stored()
    await holds("resident")
    assert await is_stored(), "its prompt fills no chunk"
    assert not await is_stored("life2")
    for key, name in zip(CHAIN[1:], ("chunk 1", "chunk 2"), strict=True):
        await client.set(KEYS.chunk(key), f"8 {name}", ex=60)
    await client.set("chunk 1", "kv")
    assert not await is_stored()
    await client.set("chunk 2", "kv")
    assert await is_stored()
    await client.delete("chunk 1", "chunk 2")
