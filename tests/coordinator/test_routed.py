"""The choice among a model's backends: what it counts, and what it leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest
import redis.asyncio as redis

from coordinator.errors import StoreLate
from coordinator.keys import shares_key, stays_key
from coordinator.placement import Placement, Reservation
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.pool.routed import STAY_MS, Split, Way, choose_way
from coordinator.redis.wire import Wire, load_scripts
from coordinator.subset import Subset
from tests.account_limits import limits_of
from tests.coordinator.stage import KEYS, chain, drained, numbers, register, request, standing_still
from tests.redis_server import RedisServer

SPLIT = Split("", "chat", "", False)
FIELD = "chat v1 1 v2 1"


@pytest.fixture
async def other(pool: Pool, redis_server: RedisServer) -> AsyncIterator[Pool]:
    """A pool on the same connection, as those of a store have."""
    wire = pool.link.required()
    other = Pool("n", pool.gateway, pool.placer.budget_s, connect=partial(Wire.open, redis_server.url, 5.0))
    await load_scripts(wire)
    other.attach(wire)
    await register(other, 2)
    yield other
    await other.seats.close()
    other.detach()


def way(pool: Pool, at: int, name: str, replica: str, weight: int = 1) -> Way:
    """A backend with one replica of this pool; "" is none."""
    asked = request(f"{name}-{at}", chain(name), serving=Subset.of([replica] if replica else []))
    return Way(pool.placer, asked, f"v{at}", weight)


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


@pytest.mark.parametrize("written", ["another kind of key", {FIELD: "no number"}])
async def test_unreadable_counts_stop_no_placement(
    pool: Pool, client: redis.Redis, written: str | dict[str, str]
) -> None:
    await register(pool, 2)
    if isinstance(written, str):
        await client.set(shares_key(), written)
    else:
        await client.hset(shares_key(), mapping=written)
    found: Counter[str] = Counter()
    for turn in range(16):
        ways = [way(pool, i + 1, f"one {turn}", f"r{i}") for i in (0, 1)]
        chosen, answer = await choose_way(ways, SPLIT)
        assert isinstance(answer, Placement)
        found[chosen.backend] += 1
    assert sum((await numbers(client, KEYS.active)).values()) == 16
    assert found == {"v1": 8, "v2": 8}


@pytest.mark.parametrize("told", ["before the late reply", "after it", "as over"])
async def test_a_request_counts_once_although_its_gateway_took_another_way_than_the_late_choice(
    pool: Pool, other: Pool, redis_server: RedisServer, client: redis.Redis, told: str
) -> None:
    await register(pool, 2)
    await choose_way([way(pool, 1, "warm up", "r0"), way(other, 2, "warm up", "r0")], SPLIT._replace(model="warm-up"))
    ways = [way(pool, 1, "late", "r0"), way(other, 2, "late", "r0")]
    for each in ways:
        each.request.limits = limits_of(requests_per_min=10)
    with standing_still(redis_server):
        pool.placer.budget_s = 0.05
        pool.clock.forget()
        with pytest.raises(StoreLate):
            await choose_way(ways, SPLIT)
        pool.placer.budget_s = 5.0
        asked = ways[1].request
        other.adopt(Reservation(asked.reservation, "r0", "life1", 100, "-", asked.budget(100, requests=1)))
        if told == "as over":
            other.done(asked.reservation)
        if told != "after it":
            other.reservations.count_adopted()
    await drained(pool)
    other.reservations.count_adopted()
    await drained(other)
    assert await client.hget(shares_key(), FIELD), "the choice was made"
    following = request("next", chain("next"), limits=limits_of(requests_per_min=10))
    placement = await pool.place(following)
    assert placement is not None
    assert placement.left[0].requests == 10 - 2


async def test_any_turns_in_a_row_as_many_as_the_weights_sum_are_shared_by_weight(pool: Pool) -> None:
    await register(pool, 3)
    weights, order = (5, 3, 2), []
    for turn in range(30):
        ways = [way(pool, i + 1, f"one {turn}", f"r{i}", weight) for i, weight in enumerate(weights)]
        order.append((await choose_way(ways, SPLIT))[0].backend)
    for start in range(21):
        assert Counter(order[start : start + 10]) == {"v1": 5, "v2": 3, "v3": 2}
    assert "v1" in order[:2]
    assert order.index("v2") < 4


async def test_a_begun_conversation_stays_and_is_not_counted(pool: Pool, client: redis.Redis) -> None:
    """Also in the next turn of the clock; then it is written there, too."""
    await register(pool, 2)

    async def choose(name: str, conversation: str, has_begun: bool) -> str:
        split = SPLIT._replace(conversation=conversation, has_begun=has_begun)
        return (await choose_way([way(pool, i + 1, name, f"r{i}") for i in (0, 1)], split))[0].backend

    first, second = "a" * 32, "b" * 32
    found = [await choose("first", first, False), await choose("second", second, False)]
    assert sorted(found) == ["v1", "v2"]
    now_ms = int((await client.time())[0]) * 1000
    for conversation in (first, second):
        key, last = (stays_key("", conversation, now_ms // STAY_MS - past) for past in (0, 1))
        assert 0 < await client.ttl(key) <= 2 * STAY_MS / 1000
        await client.rename(key, last)
    for turn in range(3):
        assert [await choose(f"{each} {turn}", each, True) for each in (first, second)] == found
    assert await client.hget(stays_key("", first, now_ms // STAY_MS), f"chat.{first}")
    assert await client.hget(shares_key(), FIELD) == "2"


async def test_what_is_not_placed_is_not_counted(pool: Pool, other: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await choose_way([way(pool, 1, "one", "r0"), way(other, 2, "one", "r0")], SPLIT)
    ways = [way(pool, 1, "two", "r9"), way(other, 2, "two", "r9")]
    assert (await choose_way(ways, SPLIT))[1] is None
    assert await client.hget(shares_key(), FIELD) == "1"


async def test_a_full_backend_refuses_its_own_share_and_no_more(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    knobs = PolicyKnobs(max_active_requests=1, max_waiting=1)
    found: Counter[tuple[str, str]] = Counter()
    for turn in range(100):
        ways = [way(pool, i + 1, f"one {turn}", f"r{i}", weight) for i, weight in enumerate((9, 1))]
        for each in ways:
            each.request.knobs = knobs
        ways[1].request.room_share = 1.0  # the other one's requests never wait
        chosen, answer = await choose_way(ways, SPLIT)
        found[chosen.backend, type(answer).__name__] += 1
    assert found == {("v1", "Placement"): 90, ("v2", "Placement"): 1, ("v2", "Seat"): 1, ("v2", "NoRoom"): 8}
    await client.delete(KEYS.waiting)


async def test_another_backend_is_asked_as_it_would_be_alone(pool: Pool, other: Pool) -> None:
    """Its chain, its tokens and its replicas are its own, whatever the first one's are."""
    await register(pool, 2)
    for turn in range(2):
        first, second = (
            request(f"a-{turn}", chain("a", "b"), tokens=[10, 20]),
            request(f"b-{turn}", chain("c", "d", "e")),
        )
        first.serving, second.serving = Subset.of(["r0", "r1"]), Subset.of(["r1"])
        chosen, answer = await choose_way([Way(pool.placer, first, "v1", 1), Way(other.placer, second, "v2", 1)], SPLIT)
        assert isinstance(answer, Placement)
        if chosen.backend == "v2":
            break
    alone = await other.place(replace(second, reservation="again"))
    assert alone is not None
    assert (answer.replica, answer.claimed_from, answer.backlog_tokens) == ("r1", 1, second.tokens[-1])
    assert (alone.matched_keys, alone.matched_tokens) == (3, second.tokens[-1])
