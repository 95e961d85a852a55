"""The choice among a model's backends: what it counts, and what it leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from functools import partial

import pytest
import redis.asyncio as redis

from coordinator.keys import shares_key
from coordinator.placement import Placement
from coordinator.pool.pool import Pool
from coordinator.pool.routed import Split, Way, choose_way
from coordinator.redis.wire import Wire, load_scripts
from coordinator.subset import Subset
from tests.coordinator.stage import KEYS, chain, numbers, register, request
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
