"""Replicas that compute prompts at different speeds: what a placement costs is time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, SPAN_TOKENS, chain, hash_of, own, place, register, request

CAPACITY_TOKENS = 10_000


async def measured(pool: Pool, client: redis.Redis, **tokens_per_s: int) -> None:
    """A heartbeat after agents have measured these rates."""
    await client.hset(KEYS.rates, mapping=tokens_per_s)
    await pool.beat()


async def explained(pool: Pool, keys: list[str]) -> dict[str, dict[str, Any]]:
    answer = await pool.explain(request("x", keys))
    assert answer is not None
    return {one["replica"]: one for one in json.loads(answer)["replicas"]}


@pytest.mark.parametrize(
    ("rates", "speeds"),
    [
        ({"r0": 3000, "r1": 1000}, {"r0": "150", "r1": "50", "?": "150"}),
        ({"r0": 1400, "r1": 1000}, {}),  # equal replicas are not measured equal
        ({"r0": 3000}, {}),
    ],
)
async def test_a_heartbeat_tells_speeds_only_if_they_differ_by_much(
    pool: Pool, client: redis.Redis, rates: dict[str, int], speeds: dict[str, str]
) -> None:
    await register(pool, 3)
    await measured(pool, client, r0=9000, r1=100)
    assert await hash_of(client, KEYS.speeds) != {}
    await client.delete(KEYS.rates)
    await measured(pool, client, **rates)
    assert await hash_of(client, KEYS.speeds) == speeds


async def test_the_time_of_a_prompt_is_divided_by_the_speed_and_who_is_not_measured_has_the_mean(
    pool: Pool, client: redis.Redis
) -> None:
    names = await register(pool, 3, capacity_tokens=CAPACITY_TOKENS)
    for name in names:
        await client.hset(KEYS.active, name, 2)
        await client.hset(KEYS.backlog_tokens, name, 500)
    equal = await explained(pool, chain(1, 2, 3))
    assert "speed" not in equal["r0"]
    await measured(pool, client, r0=3000, r1=1000)
    found = await explained(pool, chain(1, 2, 3))
    assert [found[name]["speed"] for name in names] == [1.5, 0.5, 1]
    cost, anywhere = equal["r0"]["cost"], 2 * 3 * SPAN_TOKENS  # a prompt that nobody holds counts three times
    expected = [(cost - anywhere) / speed + anywhere for speed in (1.5, 0.5, 1)]
    assert [found[name]["cost"] for name in names] == pytest.approx(expected)


async def test_prompts_are_shared_by_speed(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    await measured(pool, client, r0=8000, r1=1000)
    placed = [(await place(pool, f"p{n}", chain(n, *range(20)), seed=n)).replica for n in range(90)]
    assert 6 <= placed.index("r1") <= 8  # where it computes one, the other one computes eight
    assert 78 <= placed.count("r0") <= 82


async def test_a_slow_owner_keeps_its_prompt_if_the_rest_of_it_takes_less_time_there(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 2)
    await measured(pool, client, r0=8000, r1=1000)
    for key in (keys := chain(*range(20)))[:19]:
        await own(client, key, "r1")
    assert (await place(pool, "owned", keys)).replica == "r1"


async def test_the_load_guard_lets_a_fast_replica_have_more_requests(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    for name, active in (("r0", 30), ("r1", 10)):
        await client.hset(KEYS.active, name, active)
    assert (await explained(pool, chain(1)))["r0"]["guarded"]
    await measured(pool, client, r0=8000, r1=1000)
    found = await explained(pool, chain(1))
    assert (found["r0"]["guarded"], found["r1"]["guarded"]) == (False, True)


async def test_the_few_fast_replicas_of_a_large_fleet_are_found(pool: Pool, client: redis.Redis) -> None:
    names = await register(pool, 40)
    fast = set(names[::10])
    await measured(pool, client, **{name: 8000 if name in fast else 1000 for name in names})
    placed = [(await place(pool, f"p{n}", chain(n, *range(20)), seed=n)).replica for n in range(80)]
    assert sum(replica in fast for replica in placed) > 25  # by their number it were 8, by their speed 37
