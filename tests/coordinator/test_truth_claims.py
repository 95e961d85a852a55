"""Claims of placements on a replica whose agent reports its blocks, and on a replica without such reports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.placement import Placement, PlaceRequest
from coordinator.pool import claims
from coordinator.pool.claims import CONFIRM_S
from coordinator.pool.pool import Pool
from tests.coordinator.stage import (
    KEYS,
    chain,
    chain_of,
    drained,
    hash_of,
    now_ms,
    numbers,
    owners,
    place,
    register,
    request,
)
from tests.coordinator.stream import Stream, followed, gains


@pytest.fixture
def confirm_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit for events to confirm a claim ends with the next heartbeat."""
    monkeypatch.setattr(claims, "CONFIRM_S", 0.0)


async def computed(
    pool: Pool, reservation: str, keys: list[str], had_tokens: int = 0
) -> tuple[PlaceRequest, Placement]:
    """A request on r0 that is over."""
    asked = request(reservation, keys, pinned="r0")
    placed = await pool.place(asked)
    assert placed is not None
    pool.claims.confirm(asked, placed, had_tokens)
    return asked, placed


async def kinds(client: redis.Redis, keys: list[str]) -> list[str]:
    """The kind of each of r0's records; "" if r0 has no record."""
    return [(await owners(client, key)).get("r0", ["", ""])[1] for key in keys]


async def test_claims_lapse_where_no_event_has_confirmed_them(
    stream: Stream, pool: Pool, client: redis.Redis, confirm_at_once: None
) -> None:
    keys = chain(1, 2, 3)
    await followed(client)
    await computed(pool, "a", keys)
    await stream.say(*gains(keys[:2]))
    await pool.beat()
    await drained(pool)
    assert await kinds(client, keys) == ["resident", "resident", ""]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
    assert sorted(await client.zrange(KEYS.held("r0"), 0, -1)) == sorted(keys[:2])


async def test_events_have_two_seconds_for_it(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    assert CONFIRM_S == 2.0
    await followed(client)
    await computed(pool, "a", chain(1))
    await pool.beat()
    await drained(pool)
    assert await kinds(client, chain(1)) == ["claim"]


async def test_a_claim_whose_request_still_waits_for_its_first_token_does_not_lapse(
    stream: Stream, pool: Pool, client: redis.Redis, confirm_at_once: None
) -> None:
    await followed(client)
    await place(pool, "a", chain(1), pinned="r0")
    await pool.beat()
    await drained(pool)
    assert await kinds(client, chain(1)) == ["claim"]


async def test_claims_do_not_lapse_where_nobody_could_confirm_them(
    pool: Pool, client: redis.Redis, confirm_at_once: None
) -> None:
    await register(pool, 1)
    await computed(pool, "a", chain(1))
    await followed(client, mode="none")
    await computed(pool, "b", chain(2))
    await pool.beat()
    await drained(pool)
    assert await kinds(client, [*chain(1), *chain(2)]) == ["claim", "claim"]


async def test_only_the_claims_of_the_request_itself_lapse(
    stream: Stream, pool: Pool, client: redis.Redis, confirm_at_once: None
) -> None:
    await followed(client)
    await place(pool, "waiting", chain(1), pinned="r0")
    await computed(pool, "over", chain(1, 2))
    await pool.beat()
    await drained(pool)
    assert await kinds(client, chain(1, 2)) == ["claim", ""]


async def test_withdrawing_a_request_leaves_residency_whatever_its_reservation_is_called(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    keys = chain(1)
    number = await stream.say(*gains(keys))
    asked, placed = await computed(pool, str(number), keys)
    pool.claims.withdraw(asked, placed)
    await drained(pool)
    assert await kinds(client, keys) == ["resident"]


async def test_what_the_engine_said_it_had_does_not_lapse(
    stream: Stream, pool: Pool, client: redis.Redis, confirm_at_once: None
) -> None:
    keys = chain(1, 2, 3, 4)
    await followed(client)
    await computed(pool, "a", keys, had_tokens=350)
    await computed(pool, "b", chain(5), had_tokens=100)
    await pool.beat()
    await drained(pool)
    assert await kinds(client, [*keys, *chain(5)]) == ["claim", "claim", "claim", "", "claim"]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 400}


@pytest.mark.parametrize(
    ("record", "mode"),
    [
        ({}, "session"),
        ({"mode": "unconfirmed"}, "unconfirmed"),
        ({"mode": "token_ids"}, "token_ids"),  # as an agent of an older version says
        ({"mode": "none"}, ""),
        ({"lease_ms": -1}, ""),
        ({"incarnation": "life0"}, ""),
    ],
    ids=["session", "no sessions", "a mode that is not known", "engine without events", "lapsed lease", "another life"],
)
async def test_a_placement_says_how_the_replicas_agent_learns_chains_where_a_live_one_watches_this_life(
    pool: Pool, client: redis.Redis, record: dict[str, Any], mode: str
) -> None:
    await register(pool, 1)
    await followed(client, **record)
    placed = await place(pool, "a", chain(1))
    assert (placed.mode, placed.is_exact) == (mode, mode == "session")
    assert (await pool.beat()).is_exact("r0") == placed.is_exact


async def test_a_replica_without_an_agent_has_no_mode(pool: Pool) -> None:
    await register(pool, 1)
    placed = await place(pool, "a", chain(1))
    assert (placed.mode, placed.report) == ("", False)


@pytest.mark.parametrize(
    ("record", "report"),
    [
        ({"relearning": 1}, True),
        ({"relearning": 0}, False),
        ({"relearning": 1, "waiting": 1}, False),
        ({"relearning": 1, "lease_ms": -1}, False),
        ({"relearning": 1, "incarnation": "life0"}, False),
    ],
    ids=["relearning", "complete", "requests wait", "lapsed lease", "another life"],
)
async def test_reused_blocks_are_asked_for_only_while_the_agent_relearns_and_nothing_waits(
    pool: Pool, client: redis.Redis, record: dict[str, Any], report: bool
) -> None:
    await register(pool, 1)
    await followed(client, **record)
    placed = await place(pool, "a", chain(1))
    assert placed.report == report
    bound = await chain_of(client, chain(1)[0])
    assert bound is not None
    assert bound.split(" ")[2] == str(int(report))


async def test_reused_blocks_are_asked_for_at_most_every_100_ms(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    for name in ("r0", "r1"):
        await followed(client, name, relearning=1)
    at_once = [place(pool, f"a{i}", chain(i), pinned=name) for i, name in enumerate(("r0", "r0", "r1"))]
    assert [placed.report for placed in await asyncio.gather(*at_once)] == [True, False, True]
    await client.hset(KEYS.reports, "r0", await now_ms(client) - 100)
    assert (await place(pool, "c", chain(3), pinned="r0")).report
    assert await now_ms(client) - 10_000 < int((await hash_of(client, KEYS.reports))["r0"]) <= await now_ms(client)


async def test_a_prompt_known_to_be_resident_is_not_asked_for(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    await followed(client, relearning=1)
    await stream.say(*gains(chain(1)))
    assert not (await place(pool, "a", chain(1), pinned="r0")).report


async def test_a_warm_claim_is_asked_for_with_its_chain(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(1, 2))
    await client.delete(KEYS.bound_slot(0), KEYS.bound_slot(1))
    await followed(client, relearning=1)
    placed = await place(pool, "b", chain(1, 2))
    assert (placed.claimed_from, placed.report) == (0, True)
    assert (await chain_of(client, chain(1, 2)[1]) or "").split(" ")[-2:] == chain(1, 2)
