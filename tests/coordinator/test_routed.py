"""The choice among a model's backends: what it counts, and what it leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from functools import partial

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreLate
from coordinator.keys import shares_key
from coordinator.placement import Placement, Reservation, TenantLimits
from coordinator.pool.pool import Pool
from coordinator.pool.routed import Split, Way, choose_way
from coordinator.redis.wire import Wire, load_scripts
from coordinator.subset import Subset
from tests.coordinator.stage import KEYS, chain, drained, numbers, register, request, standing_still
from tests.redis_server import RedisServer

SPLIT = Split(shares_key(), "chat.0", "", False)


@pytest.fixture
async def other(pool: Pool, redis_server: RedisServer) -> AsyncIterator[Pool]:
    """A pool on the same connection, as those of a store have."""
    wire = pool.link.required()
    other = Pool("n", pool.gateway, pool.placer.budget_s, connect=partial(Wire.open, redis_server.url, 5.0))
    other.attach(wire, await load_scripts(wire))
    await register(other, 2)
    yield other
    await other.seats.close()
    other.detach()


def way(pool: Pool, at: int, name: str, replica: str) -> Way:
    """A backend with one replica of this pool; "" is none."""
    asked = request(f"{name}-{at}", chain(name), serving=Subset.of([replica] if replica else []))
    return Way(pool.placer, asked, f"v{at}", at, 1)


@pytest.mark.parametrize("at", ["mm", "mn"])
@pytest.mark.parametrize("replicas", [("r0", "r1"), ("", "r1"), ("r0", "")])
async def test_a_choice_leaves_no_place_of_a_window_taken(
    pool: Pool, other: Pool, at: str, replicas: tuple[str, str]
) -> None:
    """Also if its backends are parts of one pool, or if the store cannot place on the replicas of one."""
    await register(pool, 2)
    pools = {"m": pool, "n": other}
    for turn in range(4):
        ways = [way(pools[at[i]], i + 1, f"one {turn}", replicas[i]) for i in (0, 1)]
        _, answer = await choose_way(ways, SPLIT)
        assert isinstance(answer, Placement)
        assert (pool.placer.window.taken, other.placer.window.taken) == (0, 0)


@pytest.mark.parametrize("written", ["another kind of key", {"chat.0": "no number"}])
async def test_unreadable_counts_stop_no_placement(
    pool: Pool, client: redis.Redis, written: str | dict[str, str]
) -> None:
    await register(pool, 2)
    if isinstance(written, str):
        await client.set(SPLIT.shares, written)
    else:
        await client.hset(SPLIT.shares, mapping=written)
    found: Counter[str] = Counter()
    for turn in range(16):
        ways = [way(pool, i + 1, f"one {turn}", f"r{i}") for i in (0, 1)]
        chosen, answer = await choose_way(ways, SPLIT)
        assert isinstance(answer, Placement)
        found[chosen.backend] += 1
    assert sum((await numbers(client, KEYS.active)).values()) == 16
    assert found == {"v1": 8, "v2": 8}


async def test_a_request_counts_once_although_its_gateway_took_another_way_than_the_late_choice(
    pool: Pool, other: Pool, redis_server: RedisServer, client: redis.Redis
) -> None:
    await register(pool, 2)
    await choose_way([way(pool, 1, "warm up", "r0"), way(other, 2, "warm up", "r0")], SPLIT._replace(field="warm up"))
    ways = [way(pool, 1, "late", "r0"), way(other, 2, "late", "r0")]
    for each in ways:
        each.request.limits = TenantLimits(requests_per_min=10)
    with standing_still(redis_server):
        pool.placer.budget_s = 0.05
        pool.clock.forget()
        with pytest.raises(StoreLate):
            await choose_way(ways, SPLIT)
        pool.placer.budget_s = 5.0
        asked = ways[1].request
        other.adopt(Reservation(asked.reservation, "r0", "life1", 100, "-", asked.budget(100, requests=1)))
    await drained(pool)
    other.reservations.count_adopted()
    await drained(other)
    assert await client.hget(SPLIT.shares, SPLIT.field), "the choice was made"
    following = request("next", chain("next"), limits=TenantLimits(requests_per_min=10))
    placement = await pool.place(following)
    assert placement is not None
    assert placement.left[0] == 10 - 2
