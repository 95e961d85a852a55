"""explain shows the decision that place would take, and changes nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.placement import PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from gateway.settings.policies import POLICIES
from tests.coordinator.stage import KEYS, chain, drained, dump, now_ms, own, register, replica, request


async def explain(pool: Pool, asked: PlaceRequest) -> dict[str, Any]:
    answer = await pool.explain(asked)
    assert answer is not None
    return dict(json.loads(answer))


async def scramble(pool: Pool, client: redis.Redis, dice: random.Random, names: list[str]) -> list[str]:
    """Writes a state that months of use might produce, and returns a chain to place in it."""
    now = await now_ms(client)
    for name in names:
        pool.register(replica(name, state=dice.choice(["ready", "ready", "ready", "dead"])))
        await client.hset(KEYS.active, name, dice.randint(0, 20))
        await client.hset(KEYS.backlog_tokens, name, dice.randint(0, 4000))
        await client.hset(KEYS.owned_tokens, name, dice.randint(0, 50_000))
        await client.hdel(KEYS.breakers, name)
        if dice.random() < 0.3:
            await client.hset(KEYS.breakers, name, f"3 {now + dice.choice([-1000, 60_000])} {dice.choice('01')}")
    await drained(pool)
    keys = chain(dice.random(), *range(dice.randint(0, 25)))[1:]
    for name in names:
        for key in keys[: dice.randint(0, len(keys))]:
            life = dice.choice(["life1", "life1", "life0"])
            await own(client, key, name, life, hits=dice.choice([0, 8, 800]), last_use_ms=now - dice.randint(0, 20_000))
    return keys


@pytest.mark.parametrize("policy", POLICIES)
async def test_explain_writes_nothing_and_names_what_place_then_takes(
    pool: Pool, client: redis.Redis, policy: str
) -> None:
    dice = random.Random(policy)
    names = await register(pool, 5)
    await explain(pool, request("first", []))  # declares the subset of the replicas
    for case in range(10):
        keys = await scramble(pool, client, dice, names)
        asked = request(
            f"id{case}",
            keys,
            knobs=PolicyKnobs(policy),
            seed=dice.getrandbits(31),
            tried=tuple(dice.sample(names, dice.randint(0, 2))),
            order=tuple(dice.sample(names, 5)),
            pinned=dice.choice(["", "", "", "r1"]),
        )
        before = await dump(client)
        answer = await pool.explain(asked)
        assert await dump(client) == before
        placed = await pool.place(asked)
        if placed is None:
            assert answer is None
            continue
        assert answer is not None
        told = json.loads(answer)
        assert (told["replica"], told["incarnation"], told["why"], told["matched_tokens"]) == (
            placed.replica,
            placed.incarnation,
            placed.why,
            placed.matched_tokens,
        )


async def test_explain_of_a_pool_that_nobody_serves_says_so(pool: Pool) -> None:
    assert await pool.explain(request("x", chain(1))) is None


async def test_explain_needs_no_lease(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await client.delete(KEYS.gateways)
    assert (await explain(pool, request("x", chain(1))))["replica"] == "r0"
