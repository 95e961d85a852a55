"""The cost of a replica."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.pool.pool import Pool
from tests.coordinator.reference import Prompt, Replica, costs
from tests.coordinator.stage import KEYS, SPAN_TOKENS, chain, own, register, request

CAPACITY_TOKENS = 10_000
ASSUMED_CAPACITY_TOKENS = 100_000


async def by_replica(pool: Pool, asked: Any) -> dict[str, dict[str, Any]]:
    answer = await pool.explain(asked)
    assert answer is not None
    return {one["replica"]: one for one in json.loads(answer)["replicas"]}


async def test_the_script_computes_the_costs_of_the_expression(pool: Pool, client: redis.Redis) -> None:
    names = await register(pool, 4, capacity_tokens=CAPACITY_TOKENS)
    dice = random.Random(4)
    for case in range(20):
        keys = chain(case, *range(12))
        hits = dice.choice([0, 8, 80])
        fleet, depth = {}, {}
        for name in names:
            depth[name] = dice.choice([0, 0, 4, 8])
            one = Replica(dice.randint(0, 9), dice.randint(0, 4000), dice.randint(0, 10_000), CAPACITY_TOKENS)
            fleet[name] = one
            for key in keys[: depth[name]]:
                await own(client, key, name, hits=hits)
            await client.hset(KEYS.active, name, one.active)
            await client.hset(KEYS.backlog_tokens, name, one.backlog_tokens)
            await client.hset(KEYS.owned_tokens, name, one.owned_tokens)
        asked = request(f"id{case}", keys)
        answer = await pool.explain(asked)
        assert answer is not None
        told = json.loads(answer)
        by_script = {one["replica"]: one["cost"] for one in told["replicas"]}
        prompt = Prompt(keys, list(asked.tokens), told["prompt_tokens"], told["shared_hits"], depth)
        assert by_script == pytest.approx(costs(fleet, names, prompt))


async def test_what_others_share_is_shared_also_where_nobody_says_how_much_he_holds(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 2, capacity_tokens=0)
    keys = chain(*range(12))
    for key in keys[:4]:
        await own(client, key, "r0", hits=24)
    found = await by_replica(pool, request("x", keys))
    assert found["r0"]["charged_tokens"] == 800
    assert found["r1"]["charged_tokens"] == pytest.approx(800 + 400 * max(1 / 25, 16 * 400 / ASSUMED_CAPACITY_TOKENS))
    assert [found[name]["displaced_tokens"] for name in ("r0", "r1")] == [0, 0]


async def test_of_what_lies_in_cpu_memory_the_part_that_it_is_not_worth_is_charged(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 2, capacity_tokens=CAPACITY_TOKENS)
    keys = chain(*range(12))
    for key in keys[:4]:
        await client.hset(KEYS.own(key), "r0", f"life1 resident cpu {SPAN_TOKENS} 0 {2**40} 1 0 1")
    found = await by_replica(pool, request("x", keys))
    assert (found["r0"]["matched_tokens"], found["r0"]["credit_tokens"]) == (400, 320)
    assert found["r0"]["charged_tokens"] == 800 + 80
    assert found["r1"]["charged_tokens"] == 800 + 400


async def test_above_the_load_guard_is_who_has_more_than_its_share_however_little_he_costs(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 3, capacity_tokens=CAPACITY_TOKENS)
    keys = chain(*range(12))
    for key in keys:
        await own(client, key, "r0")
    await client.hset(KEYS.active, mapping={"r0": 12, "r1": 11, "r2": 1})  # the guard's limit: 1.5 times the mean of 8
    found = await by_replica(pool, request("x", keys))
    assert {name: each["guarded"] for name, each in found.items()} == {"r0": True, "r1": False, "r2": False}
    placement = await pool.place(request("x", keys))
    assert placement is not None
    assert placement.replica == "r2"
