"""The search for the depth of each owner in a chain, against a model that looks at every key."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, calls_of, chain, drained, now_ms, register, request

REPLICAS = 7
Ownership = list[dict[str, str]]
"""For each key, from shallow to deep: replica → the incarnation of its record."""


def prefix_closed(dice: random.Random, count: int) -> Ownership:
    """A replica that owns a key owns all keys before it. Only records of older incarnations may have gaps."""
    depth = {f"r{i}": dice.choice([0, 1, count, dice.randint(0, count)]) for i in range(REPLICAS)}
    state: Ownership = [{name: "life1" for name, deepest in depth.items() if i < deepest} for i in range(count)]
    for records in state:
        for i in range(REPLICAS):
            if dice.random() < 0.15:
                records.setdefault(f"r{i}", "life0")
    return state


def with_holes(dice: random.Random, count: int) -> Ownership:
    """The state after the number of owners per key was capped: any replica may lack any key."""
    state = prefix_closed(dice, count)
    return [{name: life for name, life in records.items() if dice.random() < 0.7} for records in state]


def depths(state: Ownership) -> dict[str, int]:
    """The model: the depth of the deepest key of each replica's current incarnation."""
    found = dict.fromkeys((f"r{i}" for i in range(REPLICAS)), 0)
    for index, records in enumerate(state, start=1):
        for name, life in records.items():
            if life == "life1":
                found[name] = index
    return found


async def write(client: redis.Redis, keys: list[str], state: Ownership) -> None:
    used = await now_ms(client)
    batch = client.pipeline(transaction=False)
    for key, records in zip(keys, state, strict=True):
        for name, life in records.items():
            batch.hset(KEYS.own(key), name, f"{life} claim gpu 100 0 {used} other")
    await batch.execute()


async def explained(pool: Pool, keys: list[str]) -> dict[str, Any]:
    answer = await pool.explain(request("x", keys))
    assert answer is not None
    return dict(json.loads(answer))


@pytest.mark.parametrize("seed", range(4))
async def test_where_ownership_is_prefix_closed_every_replicas_credit_is_its_deepest_key(
    pool: Pool, client: redis.Redis, seed: int
) -> None:
    dice = random.Random(seed)
    await register(pool, REPLICAS)
    for case in range(40):
        count = dice.choice([1, 2, 3, dice.randint(4, 60)])
        keys, state = chain(seed, case, *range(count))[2:], prefix_closed(dice, count)
        await write(client, keys, state)
        found = {one["replica"]: one["matched_keys"] for one in (await explained(pool, keys))["replicas"]}
        assert found == depths(state)


@pytest.mark.parametrize("seed", range(4))
async def test_where_it_is_not_credit_may_be_understated_but_is_never_invented(
    pool: Pool, client: redis.Redis, seed: int
) -> None:
    dice = random.Random(1000 + seed)
    await register(pool, REPLICAS)
    for case in range(40):
        count = dice.randint(1, 40)
        keys, state = chain(seed, case, *range(count))[2:], with_holes(dice, count)
        await write(client, keys, state)
        found = {one["replica"]: one["matched_keys"] for one in (await explained(pool, keys))["replicas"]}
        model = depths(state)
        assert all(found[name] <= model[name] for name in model)
        assert all(index == 0 or state[index - 1].get(name) == "life1" for name, index in found.items())
        deepest = max(model.values())
        assert {name for name, index in found.items() if index == deepest > 0} == {
            name for name, index in model.items() if index == deepest > 0
        }


@pytest.mark.parametrize("seed", range(2))
async def test_a_placement_sees_the_depth_that_explain_saw_and_cleans_as_it_goes(
    pool: Pool, client: redis.Redis, seed: int
) -> None:
    dice = random.Random(2000 + seed)
    await register(pool, REPLICAS)
    for case in range(25):
        count = dice.randint(1, 40)
        keys, state = chain(seed, case, *range(count))[2:], prefix_closed(dice, count)
        await write(client, keys, state)
        chosen = f"r{dice.randrange(REPLICAS)}"
        placed = await pool.place(request(f"id{case}", keys, pinned=chosen))
        assert placed is not None
        assert placed.matched_keys == depths(state)[chosen]
        for key in keys[max(depths(state).values()) :]:
            assert set(await client.hgetall(KEYS.own(key))) == {chosen}


async def test_a_chain_that_nobody_knows_costs_a_few_looks(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    await client.config_resetstat()
    await explained(pool, chain(*range(100)))
    assert (await calls_of(client))["exists"] <= 6


async def test_a_chain_whose_tip_one_replica_owns_costs_a_few(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 8)
    keys = chain(*range(100))
    await write(client, keys, [{"r3": "life1"}] * 100)
    await client.config_resetstat()
    answer = await explained(pool, keys)
    calls = await calls_of(client)
    assert answer["matched_tokens"] == 10_000
    assert calls["exists"] == 2, "one for the chain, one for what a pool may have"
    assert calls["hgetall"] <= 8


async def test_a_long_conversation_of_a_thousand_keys_is_placed(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    keys = chain(*range(1000))
    placed = await pool.place(request("a", keys))
    pool.done("a")
    await drained(pool)
    again = await pool.place(request("b", keys))
    assert placed is not None
    assert again is not None
    assert (again.replica, again.matched_keys) == (placed.replica, 1000)
