"""What `python -m bench.routing.whatif` tries out starts from the expression that the script computes."""

from __future__ import annotations

import json
import random

import pytest
import redis.asyncio as redis

from bench.routing.whatif import Load, Weights, costs
from coordinator.pool import Pool
from coordinator.scripts import PolicyKnobs
from tests.coordinator.stage import KEYS, SPAN_TOKENS, chain, own, register, request

CAPACITY_TOKENS = 10_000


async def test_whatif_computes_the_costs_that_the_script_computes(pool: Pool, client: redis.Redis) -> None:
    names = await register(pool, 4, capacity_tokens=CAPACITY_TOKENS)
    weights = Weights()
    knobs = PolicyKnobs()
    assert (knobs.request_cost_tokens, knobs.copy_weight) == (weights.request, weights.copy)
    assert (knobs.min_slack_requests, knobs.load_factor) == (weights.min_slack, weights.load_factor)
    dice = random.Random(4)
    for case in range(20):
        keys = chain(case, *range(12))
        hits = dice.choice([0, 8, 80])
        loads = {}
        for name in names:
            owned = dice.choice([0, 0, 4, 8])
            loads[name] = Load(dice.randint(0, 9), dice.randint(0, 4000), dice.randint(0, 10_000), owned * SPAN_TOKENS)
            for key in keys[:owned]:
                await own(client, key, name, hits=hits)
            await client.hset(KEYS.active, name, loads[name].active)
            await client.hset(KEYS.backlog_tokens, name, loads[name].backlog_tokens)
            await client.hset(KEYS.owned_tokens, name, loads[name].owned_tokens)
        answer = await pool.explain(request(f"id{case}", keys))
        assert answer is not None
        told = json.loads(answer)
        by_script = {one["replica"]: one["cost"] for one in told["replicas"]}
        computed = costs(weights, list(loads.values()), CAPACITY_TOKENS, told["prompt_tokens"], told["shared_hits"])
        assert by_script == pytest.approx(dict(zip(loads, computed, strict=True)))
