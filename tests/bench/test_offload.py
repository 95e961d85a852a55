"""A small `python -m bench.offload`: its requests, where the KV is stored, and its report."""

from __future__ import annotations

import asyncio

import pytest

from bench.offload.measure import Row, measure
from bench.offload.scenarios import Scenario
from bench.offload.stages import BLOCKS, Tier, simulated
from bench.routing.mixes import BYTES_PER_TOKEN, Workload
from bench.workloads import one_turn, user, words
from gateway.simulator.settings import SimLmcacheSettings

SEED = 3
PROMPT_TOKENS, PROMPTS = 10_000, 6
CHUNK = 1024
CHUNK_BYTES = SimLmcacheSettings(cpu_gb=1, chunk_tokens=CHUNK).chunk_kv_bytes


def twice(_seed: int, _sizes: object) -> Workload:
    """More prompts than the GPU can hold. Each is requested once before the measurement and once during it."""
    assert PROMPTS * PROMPT_TOKENS > BLOCKS * 16
    asks = [one_turn(n, user(words(f"{n}" * PROMPT_TOKENS * BYTES_PER_TOKEN))) for n in range(PROMPTS)]
    return Workload(asks, asks, list(range(PROMPTS)))


TWICE = Scenario("twice", "six prompts", 1, twice)


def measured(tier: Tier) -> Row:
    with simulated(tier, speed=2000, redis_gb_per_s=1) as fresh, fresh() as stage:
        return asyncio.run(measure(stage, TWICE, tier, SEED))


@pytest.mark.slow
def test_what_the_gpu_has_no_room_for_is_computed_again_without_a_tier() -> None:
    row = measured(Tier("gpu"))
    assert (row.requests, row.failed, row.gpu_share, row.loaded_share, row.stored_gb) == (PROMPTS, 0, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("tier", [Tier("cpu", CHUNK), Tier("redis", CHUNK)], ids=lambda tier: tier.name)
def test_with_a_tier_it_is_loaded_in_whole_chunks_and_is_where_the_tier_is(tier: Tier) -> None:
    row = measured(tier)
    chunks = PROMPTS * (PROMPT_TOKENS // CHUNK)
    assert (row.requests, row.failed) == (PROMPTS, 0)
    assert 0.8 < row.loaded_share < 1
    held = {"cpu": row.cpu_bytes, "redis": row.redis_bytes}
    assert held.pop(tier.name) == chunks * CHUNK_BYTES
    assert list(held.values()) == [0]
    assert row.fetched_bytes == (row.redis_bytes if tier.name == "redis" else 0)
