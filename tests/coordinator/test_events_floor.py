"""Records that are no longer valid: resets, floors, and entries that the stream's cap cut off."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.maintenance.worker import Worker
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, chain, hash_of, numbers, owners, place, replica, sweep
from tests.coordinator.stream import (
    RESET,
    Stream,
    followed,
    gains,
    losses,
)


async def floor(client: redis.Redis) -> int:
    return int((await hash_of(client, KEYS.replicas))["r0"].split(" ")[4])


async def test_what_was_said_before_a_reset_is_not_chosen(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    old, new = chain("old", 1, 2), chain("new", 1)
    await stream.say(*gains(old))
    number = await stream.say(RESET)
    await stream.say(*gains(new))
    assert await floor(client) == number
    assert (await place(pool, "a", old, pinned="r0")).matched_keys == 0
    assert (await place(pool, "b", new, pinned="r0")).matched_keys == 2


async def test_a_claim_outlives_a_reset(stream: Stream, pool: Pool) -> None:
    """A claim predicts the result of its request's computation."""
    await place(pool, "a", chain(1, 2), pinned="r0")
    await stream.say(RESET)
    assert (await place(pool, "b", chain(1, 2), pinned="r0")).matched_keys == 2


async def test_what_an_entry_says_before_a_reset_in_it_is_void_and_what_it_says_behind_holds(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    """An agent collects transitions for a short time, so one entry can contain a new key and a reset."""
    before, behind = chain("before", 1), chain("behind", 1)
    await stream.say(*gains(before), *losses(before[1:]), RESET, *gains(behind))
    assert (await place(pool, "a", before, pinned="r0")).matched_keys == 0
    assert (await place(pool, "b", behind, pinned="r0")).matched_keys == 2


async def test_a_chain_of_which_everything_lies_below_the_floor_is_claimed_from_the_root(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    keys = chain(1, 2, 3, 4)
    await stream.say(*gains(keys))
    await stream.say(RESET)
    assert (await place(pool, "a", keys, pinned="r0")).claimed_from == 1
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 400}


async def test_a_restatement_voids_what_it_does_not_repeat(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    kept, gone = chain("kept", 1), chain("gone", 1)
    await stream.say(*gains(kept), *gains(gone))
    await stream.say_all(gains(kept), 0)
    assert await floor(client) == 2
    assert (await place(pool, "a", kept, pinned="r0")).matched_keys == 2
    assert await sweep(pool, "r0") == 2
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
    assert (await place(pool, "b", gone, pinned="r0")).matched_keys == 0


async def test_a_restatement_of_nothing_voids_everything(stream: Stream, pool: Pool) -> None:
    await stream.say(*gains(chain(1)))
    await stream.say_all([], 0)
    assert (await place(pool, "a", chain(1), pinned="r0")).matched_keys == 0


async def test_a_sweep_takes_out_what_lies_below_the_floor_and_of_past_lives(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    past, old, new = chain("past", 1), chain("old", 1, 2), chain("new", 1)
    await stream.say(*gains(past))
    await pool.register(replica("r0", "life2"))
    stream.link.incarnation = "life2"
    await stream.say(*gains(old))
    await stream.say(RESET)
    await stream.say(*gains(new))
    assert await sweep(pool, "r0") == 5
    assert [await owners(client, key) for key in (*past, *old)] == [{}] * 5
    assert sorted(await client.zrange(KEYS.held("r0"), 0, -1)) == sorted(new)
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
    assert await sweep(pool, "r0") == 0


async def test_a_sweep_leaves_other_replicas_alone(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    keys = chain(1, 2)
    await place(pool, "a", keys, pinned="r1")
    await stream.say(*gains(keys))
    await stream.say(RESET)
    assert await sweep(pool, "r0") == 2
    assert [list(await owners(client, key)) for key in keys] == [["r1"], ["r1"]]
    assert await numbers(client, KEYS.owned_tokens) == {"r1": 200}


async def test_the_worker_sweeps_an_exact_replica_when_its_floor_has_moved(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    await followed(client)
    await stream.say(*gains(chain("old", 1)))
    worker = Worker(pool)
    await worker.tick()
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
    await stream.say(RESET)
    await worker.tick()
    assert await numbers(client, KEYS.owned_tokens) == {}
