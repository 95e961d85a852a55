"""How the entries of a replica's event stream change the map."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreRefused
from coordinator.pool.pool import Pool
from tests.coordinator.stage import (
    KEYS,
    chain,
    drained,
    dump,
    now_ms,
    numbers,
    own,
    owners,
    place,
)
from tests.coordinator.stream import (
    BLOCK_HASH,
    Stream,
    gains,
    losses,
)


async def test_one_call_changes_the_map_and_writes_the_stream(stream: Stream, client: redis.Redis) -> None:
    [key] = keys = chain(1)
    assert await stream.say(*gains(keys)) == 1
    assert list(await owners(client, key)) == ["r0"]
    [(entry_id, entry)] = await client.xrange(KEYS.events("r0"))
    assert (entry["n"], entry["inc"], entry["transitions"]) == ("1", "life1", f"+ {key} 100 100 gpu {BLOCK_HASH:016x}")
    assert await client.hget(KEYS.cursors, "r0") == f"{entry_id} 1"


@pytest.mark.parametrize("wrong", ["held:r0", "owned_tokens", "events:r0"])
async def test_a_key_of_another_type_refuses_an_entry_as_a_whole(
    stream: Stream, client: redis.Redis, wrong: str
) -> None:
    key = KEYS.replicas.replace("replicas", wrong)
    await client.set(key, "foreign")
    before = await dump(client, "kvgate:*")
    with pytest.raises(StoreRefused):
        await stream.say(*gains(chain(1)))
    assert await dump(client, "kvgate:*") == before


async def test_residency_confirms_a_claim_and_keeps_its_use(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    keys = chain(1, 2)
    used = await now_ms(client) + 5
    await own(client, keys[0], "r0", hits=16, last_use_ms=used)
    await client.hset(KEYS.owned_tokens, "r0", 100)
    await client.zadd(KEYS.held("r0"), {keys[0]: used - 1})
    number = await stream.say(*gains(keys, span=96))
    record = (await owners(client, keys[0]))["r0"]
    expected = ["life1", "resident", "gpu", "96", "16", str(used), str(number), "96", f"{BLOCK_HASH:016x}"]
    assert record == expected
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 192}
    assert await client.zscore(KEYS.held("r0"), keys[0]) == used - 1
    placed = await place(pool, "a", keys)
    assert (placed.replica, placed.matched_kind, placed.matched_entry) == ("r0", "resident", str(number))
    assert (placed.matched_tokens, placed.backlog_tokens) == (192, 8)


async def test_an_eviction_removes_residency(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    keys = chain(1, 2, 3)
    await stream.say(*gains(keys))
    await stream.say(*losses(keys[1:]))
    assert [list(await owners(client, key)) for key in keys] == [["r0"], [], []]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}
    assert await client.zrange(KEYS.held("r0"), 0, -1) == keys[:1]


async def test_an_eviction_leaves_a_claim(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    """The request that claimed the key computes it again, after the events in this entry."""
    keys = chain(1, 2)
    await place(pool, "a", keys, pinned="r0")
    await drained(pool)
    await stream.say(*losses(keys))
    assert [(await owners(client, key))["r0"][1] for key in keys] == ["claim", "claim"]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}


async def test_a_key_moves_to_another_medium(stream: Stream, client: redis.Redis) -> None:
    keys = chain(1)
    await stream.say(*gains(keys))
    await stream.say(*gains(keys, medium="cpu"))
    assert (await owners(client, keys[0]))["r0"][1:4] == ["resident", "cpu", "100"]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}
