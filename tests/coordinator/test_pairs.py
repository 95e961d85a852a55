"""A pair: one script places a request where it is decoded and where it is prefilled, and both loads are given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.maintenance.reaper import Reaper
from coordinator.placement import NOTHING, Placement, PlaceRequest, Prefill
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.subset import Subset
from tests.coordinator.queueing import ONE_EACH, asking, queued, two_gateways
from tests.coordinator.stage import KEYS, SPAN_TOKENS, beaten, chain, drained, now_ms, replica
from tests.coordinator.stream import followed
from tests.redis_server import RedisServer

DECODES, PREFILLS = Subset.of(["r0", "r1"]), Subset.of(["r2", "r3"])
MANY_EACH = PolicyKnobs(max_active_requests=8)


def pairing(name: str, knobs: PolicyKnobs = MANY_EACH, least_tokens: int = 1, **changes: Any) -> PlaceRequest:
    """A request that is decoded by r0 or r1, and may be prefilled by r2 or r3."""
    asked = asking(name, knobs, **changes)
    asked.serving, asked.prefill = DECODES, Prefill(PREFILLS, least_tokens)
    return asked


@asynccontextmanager
async def four_replicas(server: RedisServer) -> AsyncIterator[tuple[Pool, Pool]]:
    async with two_gateways(server, 4) as gateways:
        yield gateways


async def placed(pool: Pool, asked: PlaceRequest) -> Placement:
    placement = await pool.place(asked)
    assert isinstance(placement, Placement)
    return placement


async def prefilled(pool: Pool, asked: PlaceRequest) -> str:
    """The replica that prefills for it; or why it is prefilled where it is decoded."""
    placement = await placed(pool, asked)
    assert placement.replica in DECODES
    if placement.prefill is None:
        return placement.unpaired
    assert placement.unpaired == ""
    assert placement.prefill.replica in PREFILLS
    return placement.prefill.replica


async def loads(client: redis.Redis) -> tuple[dict[str, str], dict[str, str]]:
    """Requests in flight, and tokens to prefill, where there are any."""
    found = [await client.hgetall(key) for key in (KEYS.active, KEYS.backlog_tokens)]
    of_each = [{name: told for name, told in each.items() if told != "0"} for each in found]
    return of_each[0], of_each[1]


async def test_both_ends_hold_load_and_only_the_prefill_has_tokens_to_compute(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with four_replicas(redis_server) as (one, _):
        placement = await placed(one, pairing("a"))
        assert placement.prefill is not None
        await drained(one)
        ends = {placement.replica: "1", placement.prefill.replica: "1"}
        assert await loads(client) == (ends, {placement.prefill.replica: str(SPAN_TOKENS)})
        assert set(await client.hkeys(KEYS.flight("gw0"))) == {"a", "ap"}
        one.done("ap", NOTHING)
        await drained(one)
        assert await loads(client) == ({placement.replica: "1"}, {})
        one.done("a", NOTHING)
        await drained(one)
        assert await loads(client) == ({}, {})


async def test_a_prompt_that_is_computed_elsewhere_delays_none_of_those_placed_at_the_same_time(
    redis_server: RedisServer,
) -> None:
    async with four_replicas(redis_server) as (one, _):
        asked = [pairing(f"{number}", keys=chain(number, *range(number))) for number in range(4)]
        for each in asked:
            each.serving = Subset.of(["r0"])
        placements = await asyncio.gather(*(placed(one, each) for each in asked))
        assert {each.unpaired for each in placements} == {""}
        assert [each.ahead_tokens for each in placements] == [0] * 4


async def test_what_decode_holds_is_not_prefilled_elsewhere_but_a_claim_of_a_watched_engine_does_not_count(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    keys = chain("a", "b", "c")
    async with four_replicas(redis_server) as (one, _):
        first = await prefilled(one, pairing("first", keys=keys))
        assert first in PREFILLS
        assert await prefilled(one, pairing("unwatched", keys=keys, least_tokens=2 * SPAN_TOKENS)) == "short"
        for name in DECODES.replicas:
            await followed(client, name)
        again = await placed(one, pairing("again", keys=keys, least_tokens=2 * SPAN_TOKENS))
        assert (again.matched_tokens, again.matched_kind) == (3 * SPAN_TOKENS, "claim")
        assert again.prefill is not None
        assert again.prefill.replica == first
        for key in keys:
            told = (await client.hget(KEYS.own(key), again.replica)).split(" ")
            resident = [told[0], "resident", *told[2:6], "1", str(3 * SPAN_TOKENS), "00"]
            await client.hset(KEYS.own(key), again.replica, " ".join(resident))
        assert await prefilled(one, pairing("last", keys=keys, least_tokens=2 * SPAN_TOKENS)) == "short"


async def test_a_replica_that_computes_its_own_prompts_gets_no_help(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with four_replicas(redis_server) as (one, _):
        asked = [pairing(f"{number}") for number in range(8)]
        for each in asked:
            each.prefill = Prefill(PREFILLS, 1, ("r0",))
        placements = [await placed(one, each) for each in asked]
        assert {each.unpaired for each in placements if each.replica == "r0"} == {"itself"}
        told = {each.unpaired for each in placements if each.replica == "r1"}
        assert "" in told
        assert "itself" not in told


async def test_a_replica_that_never_computes_prompts_gets_help_however_little_is_missing(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with four_replicas(redis_server) as (one, _):
        asked = [pairing(f"{number}") for number in range(8)]
        for each in asked:
            each.prefill = Prefill(PREFILLS, 10**6, (), ("r1",))
        placements = [await placed(one, each) for each in asked]
        assert {each.replica: each.prefill is not None for each in placements} == {"r0": False, "r1": True}


async def long_prompts(pool: Pool, *names: str, least_tokens: int = 1) -> None:
    """Places prompts of 300 tokens, which nobody has computed yet. With many `least_tokens`, decode computes them."""
    for name in names:
        await placed(pool, pairing(name, keys=chain(name, 2, 3), least_tokens=least_tokens))
    await drained(pool)


async def test_a_prompt_that_would_wait_longer_elsewhere_than_where_it_is_decoded_is_computed_there(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with four_replicas(redis_server) as (one, _):
        await long_prompts(one, "a", "b")
        busy = {name: str(3 * SPAN_TOKENS) for name in PREFILLS.replicas}
        assert (await loads(client))[1] == busy
        assert await prefilled(one, pairing("short", keys=chain("short"))) == "no_room"
        one.done("short", NOTHING)
        await drained(one)
        needed = pairing("needed", keys=chain("needed"))
        needed.prefill = Prefill(PREFILLS, 1, (), tuple(DECODES.replicas))
        assert await prefilled(one, needed) in PREFILLS
        for name in ("needed", "neededp"):
            one.done(name, NOTHING)
        await drained(one)
        assert await prefilled(one, pairing("long", keys=chain("long", *range(3)))) in PREFILLS
        for name in ("long", "longp"):
            one.done(name, NOTHING)
        await long_prompts(one, "c", "d", least_tokens=10**6)
        assert (await loads(client))[1] == busy | {name: str(3 * SPAN_TOKENS) for name in DECODES.replicas}
        assert await prefilled(one, pairing("waits at both", keys=chain("waits at both"))) in PREFILLS


async def test_its_own_load_where_it_is_decoded_is_no_wait(redis_server: RedisServer, client: redis.Redis) -> None:
    keys = chain(*range(3))
    async with four_replicas(redis_server) as (one, _):
        assert await prefilled(one, pairing("holds", keys=keys[:2], least_tokens=10**6)) == "short"
        one.done("holds", NOTHING)
        await drained(one)
        missing = await placed(one, pairing("one of three", keys=keys))
        assert (missing.matched_tokens, missing.unpaired) == (2 * SPAN_TOKENS, "no_room")


@pytest.mark.parametrize(
    ("rates", "is_paired"),
    [
        ({"r0": 1000, "r1": 1000, "r2": 3000, "r3": 3000}, True),
        ({"r0": 1000, "r1": 1000, "r2": 1500, "r3": 1500}, False),
        ({"r2": 80_000, "r3": 80_000}, False),  # nobody knows how fast the others are
        ({"r0": 80, "r1": 80}, False),
    ],
)
async def test_a_wait_is_as_long_as_replicas_are_slow(
    redis_server: RedisServer, client: redis.Redis, rates: dict[str, int], is_paired: bool
) -> None:
    async with four_replicas(redis_server) as (one, _):
        await long_prompts(one, "a", "b")
        await client.hset(KEYS.rates, mapping=rates)
        assert (await prefilled(one, pairing("short", keys=chain("short"))) in PREFILLS) is is_paired


async def test_without_a_replica_that_can_prefill_it_is_prefilled_where_it_is_decoded(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with four_replicas(redis_server) as (one, _):
        for name in PREFILLS.replicas:
            assert await prefilled(one, pairing(f"fills-{name}", ONE_EACH)) in PREFILLS
            one.done(f"fills-{name}", NOTHING)
        await drained(one)
        assert await prefilled(one, pairing("full", ONE_EACH)) == "no_room"
        one.done("full", NOTHING)
        for name in PREFILLS.replicas:
            one.done(f"fills-{name}p", NOTHING)
            one.register(replica(name, state="dead"))
        await drained(one)
        assert await prefilled(one, pairing("dead", ONE_EACH)) == "none"
        assert await client.hkeys(KEYS.flight("gw0")) == ["dead"]


async def test_a_request_that_waited_for_a_place_to_decode_gets_both_places(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with four_replicas(redis_server) as (one, other):
        for name in ("full0", "full1"):
            assert await prefilled(one, pairing(name, ONE_EACH, least_tokens=10**6)) == "short"
        waits = await queued(client, other, pairing("waits", ONE_EACH))
        one.done("full0", NOTHING)
        granted = await waits
        assert isinstance(granted, Placement)
        assert granted.prefill is not None
        await drained(one, other)
        assert set(await client.hkeys(KEYS.flight("gw1"))) == {"waits", "waitsp"}


async def test_a_new_life_of_the_store_and_a_dead_gateway_keep_and_free_both_ends(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with four_replicas(redis_server) as (one, other):
        assert await prefilled(one, pairing("a")) in PREFILLS
        await client.flushall()
        for pool in (one, other, one):
            await beaten(pool)
        await drained(one)
        assert set(await client.hkeys(KEYS.flight("gw0"))) == {"a", "ap"}
        await client.hset(KEYS.gateways, "gw0", f"{one.link.epoch} {await now_ms(client) - 1}")
        await Reaper(other).give_back(["gw0"])
        assert await loads(client) == ({}, {})
