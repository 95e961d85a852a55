"""The value of prompts that no GPU holds, but that LMCache has in this Redis, or a replica has in its CPU memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.placement import PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, SPAN_TOKENS, chain, own, place, register, request
from tests.coordinator.test_cost import by_replica

TTL_S = 60
COUNT = 8


@pytest.fixture
async def keys(pool: Pool, client: redis.Redis) -> AsyncIterator[list[str]]:
    """A chain of 800 tokens that no replica holds. Every second key completes a chunk. All chunks are in Redis, and
    three replicas can load them."""
    await register(pool, 3)
    keys = chain(*range(COUNT))
    for number in range(1, COUNT // 2 + 1):
        await store(client, keys, number)
    await client.hset(KEYS.tiers, mapping=dict.fromkeys(("r0", "r1", "r2"), "- 0.9"))
    yield keys
    for number in range(1, COUNT // 2 + 1):
        await lose(client, number)


async def store(client: redis.Redis, keys: list[str], number: int) -> None:
    """LMCache stores chunk `number` of the chain, and an agent publishes its name."""
    await client.set(f"kvchunk@model@{number}", "KV", ex=TTL_S)
    name = f"{2 * SPAN_TOKENS * number} kvchunk@model@{number}"
    await client.set(KEYS.chunk(keys[2 * number - 1]), name, ex=TTL_S)


async def lose(client: redis.Redis, number: int) -> None:
    await client.delete(f"kvchunk@model@{number}")


async def stored(pool: Pool, asked: PlaceRequest) -> tuple[int, str]:
    answer = await pool.explain(asked)
    assert answer is not None
    told: dict[str, Any] = json.loads(answer)
    return told["stored_tokens"], told["why"]


async def test_what_every_replica_can_load_goes_to_the_least_loaded(
    pool: Pool, client: redis.Redis, keys: list[str]
) -> None:
    await client.hset(KEYS.active, mapping={"r0": 3, "r1": 1, "r2": 2})
    placed = await place(pool, "a", keys)
    assert (placed.replica, placed.why) == ("r1", "stored")
    assert (placed.stored_keys, placed.stored_tokens, placed.matched_tokens) == (COUNT, 800, 0)


async def test_loading_counts_as_the_part_of_the_prefill_that_it_does_not_save(
    pool: Pool, client: redis.Redis, keys: list[str]
) -> None:
    assert (await place(pool, "a", keys, pinned="r2")).backlog_tokens == pytest.approx(80, abs=1)
    found = await by_replica(pool, request("x", keys))
    assert {name: each["credit_tokens"] for name, each in found.items()} == {"r0": 720, "r1": 720, "r2": 800}
    assert (await place(pool, "b", keys)).replica == "r2"


async def test_who_holds_the_beginning_loads_the_rest(pool: Pool, client: redis.Redis, keys: list[str]) -> None:
    for key in keys[:4]:
        await own(client, key, "r1")
    found = await by_replica(pool, request("x", keys))
    assert {name: each["credit_tokens"] for name, each in found.items()} == {"r0": 720, "r1": 400 + 360, "r2": 720}
    placed = await place(pool, "a", keys)
    assert (placed.replica, placed.why, placed.matched_tokens, placed.stored_tokens) == ("r1", "hit", 400, 800)


async def test_an_answer_that_can_be_loaded_counts_once(pool: Pool, client: redis.Redis, keys: list[str]) -> None:
    for key in keys[:2]:
        await own(client, key, "r1")
    found = await by_replica(pool, request("x", keys, answer=(2, 6)))
    assert found["r1"]["credit_tokens"] == 600 + 180, "200 tokens and the answer's 400; 0.9 of the last 200"
    assert found["r0"]["credit_tokens"] == 720


async def test_what_another_replica_holds_is_passed_over_unless_it_can_be_loaded(
    pool: Pool, client: redis.Redis, keys: list[str]
) -> None:
    for key in keys:
        await own(client, key, "r1")
    assert (await place(pool, "a", keys, pinned="r1")).passed_over_tokens == 0
    assert (await place(pool, "b", keys, tried=("r0", "r1"))).passed_over_tokens == 0
    await client.delete(KEYS.tiers)
    asked = request("c", keys, knobs=PolicyKnobs("least_loaded"))
    await client.hset(KEYS.active, mapping={"r0": 0, "r1": 9, "r2": 9})
    placed = await pool.place(asked)
    assert placed is not None
    assert (placed.replica, placed.passed_over_tokens) == ("r0", 800)


@pytest.mark.parametrize(("lost", "left_tokens"), [(4, 600), (3, 400), (1, 0)])
async def test_what_lies_behind_a_chunk_that_is_gone_counts_for_nothing(
    pool: Pool, client: redis.Redis, keys: list[str], lost: int, left_tokens: int
) -> None:
    await lose(client, lost)
    assert await stored(pool, request("x", keys)) == (left_tokens, "stored" if left_tokens else "cold")


async def test_a_chain_that_goes_on_differently_has_what_it_shares(pool: Pool, keys: list[str]) -> None:
    assert await stored(pool, request("x", [*keys[:5], *chain("another", 1, 2, 3)])) == (400, "stored")


async def test_a_replica_without_lmcache_loads_nothing(pool: Pool, client: redis.Redis, keys: list[str]) -> None:
    await client.hset(KEYS.tiers, mapping={"r0": "- -", "r1": "- 0.9"})
    await client.hdel(KEYS.tiers, "r2")
    found = await by_replica(pool, request("x", keys))
    assert {name: each["credit_tokens"] for name, each in found.items()} == {"r0": 0, "r1": 720, "r2": 0}
    placed = await place(pool, "a", keys, pinned="r0")
    assert (placed.why, placed.stored_keys, placed.stored_tokens) == ("pinned", 0, 0)
    assert placed.backlog_tokens == 800


async def test_until_it_is_measured_loading_is_worth_somewhat_less_than_having(
    pool: Pool, client: redis.Redis, keys: list[str]
) -> None:
    await client.hset(KEYS.tiers, mapping={"r0": "- ?", "r1": "- ?", "r2": "- -"})
    found = await by_replica(pool, request("x", keys))
    assert {name: each["store_credit"] for name, each in found.items()} == {"r0": 0.6, "r1": 0.6, "r2": 0}


async def test_what_one_replica_has_measured_is_expected_of_those_that_have_not(
    pool: Pool, client: redis.Redis, keys: list[str]
) -> None:
    await client.hset(KEYS.tiers, mapping={"r0": "- ?", "r1": "- 0.5", "r2": "- 0.7"})
    found = await by_replica(pool, request("x", keys))
    assert {name: each["store_credit"] for name, each in found.items()} == {"r0": 0.7, "r1": 0.5, "r2": 0.7}


async def test_a_tier_in_cpu_memory_is_worth_what_its_agent_measured(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    keys = chain(*range(COUNT))
    for name in ("r0", "r1"):
        await client.hset(KEYS.own(keys[-1]), name, f"life1 resident cpu {SPAN_TOKENS} 0 {2**40} 1 0 1")
    await client.hset(KEYS.tiers, "r0", "0.5 -")
    found = await by_replica(pool, request("x", keys))
    assert {name: each["credit_tokens"] for name, each in found.items()} == {"r0": 400, "r1": 640}


async def test_where_no_replica_has_a_tier_nothing_is_looked_up(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 3)
    await client.config_resetstat()
    await place(pool, "a", chain(*range(COUNT)))
    calls = await client.info("commandstats")
    assert "cmdstat_mget" not in calls
