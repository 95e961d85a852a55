"""Each policy does what its name says."""

from __future__ import annotations

from collections import Counter

import redis.asyncio as redis

from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, chain, drained, own, place, register, replica

DRAWS = 200


async def draw(pool: Pool, policy: str, count: int = DRAWS) -> Counter[str]:
    """The number of requests that each replica receives; every request sees the same load."""
    chosen: Counter[str] = Counter()
    for i in range(count):
        placed = await place(
            pool, "a", [], knobs=PolicyKnobs(policy), prompt_tokens=1, seed=(i * 2_654_435_761) % 2**31
        )
        chosen[placed.replica] += 1
        pool.done("a")
        await drained(pool)
    return chosen


async def test_round_robin_goes_on_over_those_that_are_left(pool: Pool) -> None:
    await register(pool, 3)
    pool.register(replica("r1", state="dead"))
    knobs = PolicyKnobs("round_robin")
    chosen = [(await place(pool, f"id{i}", chain(i), knobs=knobs)).replica for i in range(4)]
    assert chosen == ["r0", "r2", "r0", "r2"]


async def test_random_is_uniform_whatever_the_load(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 4)
    await client.hset(KEYS.active, "r0", 50)
    chosen = await draw(pool, "random")
    assert set(chosen) == {"r0", "r1", "r2", "r3"}
    assert min(chosen.values()) > DRAWS / 4 * 0.5


async def test_least_loaded_takes_the_fewest_active_requests(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 4)
    await client.hset(KEYS.active, mapping={"r0": 3, "r1": 2, "r2": 1, "r3": 4})
    assert await draw(pool, "least_loaded", 20) == {"r2": 20}


async def test_least_loaded_breaks_ties_by_backlog_then_by_chance(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 4)
    await client.hset(KEYS.backlog_tokens, mapping={"r0": 300, "r1": 100, "r2": 100, "r3": 200})
    assert set(await draw(pool, "least_loaded", 40)) == {"r1", "r2"}


async def test_power_of_two_takes_the_less_loaded_of_two_drawn(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 4)
    await client.hset(KEYS.active, mapping={"r0": 9, "r1": 3, "r2": 2, "r3": 1})
    chosen = await draw(pool, "power_of_two")
    # The busiest replica wins only against itself: 1 pair of 16. The least busy wins 7 pairs of 16.
    assert chosen["r0"] < DRAWS * 0.15
    assert DRAWS * 0.3 < chosen["r3"] < DRAWS * 0.6
    assert chosen["r3"] > chosen["r2"] > chosen["r1"] > chosen["r0"]


async def test_consistent_hash_takes_the_first_of_the_order(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 3)
    keys = chain(1)
    await own(client, keys[0], "r0")
    knobs = PolicyKnobs("consistent_hash")
    placed = await place(pool, "a", keys, knobs=knobs, order=("gone", "r2", "r0", "r1"))
    assert placed.replica == "r2"


async def test_consistent_hash_leaves_the_order_only_for_the_next_in_it(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 3)
    knobs, order = PolicyKnobs("consistent_hash"), ("r2", "r0", "r1")
    await client.hset(KEYS.active, mapping={"r2": 40})
    assert (await place(pool, "a", chain(1), knobs=knobs, order=order)).replica == "r0"
    pool.register(replica("r0", state="dead"))
    assert (await place(pool, "b", chain(1), knobs=knobs, order=order)).replica == "r1"


async def test_every_policy_reports_and_claims_what_the_replica_holds(pool: Pool) -> None:
    await register(pool, 1)
    keys = chain(1, 2, 3)
    await place(pool, "first", keys)
    for policy in ("random", "round_robin", "least_loaded", "power_of_two", "consistent_hash"):
        placed = await place(pool, policy, [*keys, *chain(policy)], knobs=PolicyKnobs(policy), order=("r0",))
        assert (placed.why, placed.matched_keys, placed.claimed_from) == ("hit", 3, 4)
