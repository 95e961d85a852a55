"""An answer tells the length of its prompt. From then on the claim on its tip is exact."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.placement import Placement, PlaceRequest
from coordinator.pool.engine_feedback import tell_measured
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, chain, drained, numbers, owners, place, register, request
from tests.coordinator.stream import Stream, gains


async def placed_on_r0(pool: Pool, reservation: str, keys: list[str]) -> tuple[PlaceRequest, Placement]:
    asked = request(reservation, keys, pinned="r0")
    placement = await pool.place(asked)
    assert placement is not None
    return asked, placement


async def test_the_next_request_with_that_prompt_is_told_its_exact_length(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    keys = chain(1, 2)
    asked, placed = await placed_on_r0(pool, "a", keys)
    before = (await owners(client, keys[1]))["r0"]
    assert await tell_measured(pool, asked, placed, 187) == 1
    assert (await owners(client, keys[1]))["r0"] == [*before, "187"]
    assert len((await owners(client, keys[0]))["r0"]) == 7
    again = await place(pool, "b", keys)
    assert (again.matched_kind, again.matched_entry, again.matched_tokens) == ("claim", "", 187)
    assert again.backlog_tokens == 13
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}


async def test_telling_it_again_replaces_it(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    asked, placed = await placed_on_r0(pool, "a", chain(1))
    assert [await tell_measured(pool, asked, placed, tokens) for tokens in (90, 95)] == [1, 1]
    assert (await owners(client, chain(1)[0]))["r0"][6:] == ["a", "95"]


async def test_only_the_request_that_claimed_the_tip_measures_it(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(1))
    asked, placed = await placed_on_r0(pool, "b", chain(1))
    assert await tell_measured(pool, asked, placed, 90) == 0
    assert (await owners(client, chain(1)[0]))["r0"][6:] == ["a"]


async def test_what_its_engine_told_of_is_left_alone(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    keys = chain(1)
    number = await stream.say(*gains(keys))
    asked, placed = await placed_on_r0(pool, str(number), keys)
    before = await owners(client, keys[0])
    assert await tell_measured(pool, asked, placed, 90) == 0
    assert await owners(client, keys[0]) == before


async def test_a_measured_claim_can_be_withdrawn_like_any(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    withdrawn, placed = await placed_on_r0(pool, "a", chain(1))
    await tell_measured(pool, withdrawn, placed, 90)
    pool.claims.withdraw(withdrawn, placed)
    await drained(pool)
    assert await owners(client, chain(1)[0]) == {}


async def test_a_measured_claim_becomes_resident_like_any(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    keys = chain(1)
    asked, placed = await placed_on_r0(pool, "a", keys)
    await tell_measured(pool, asked, placed, 90)
    await stream.say(*gains(keys, span=80))
    assert (await owners(client, keys[0]))["r0"][1:4] == ["resident", "gpu", "80"]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 80}
