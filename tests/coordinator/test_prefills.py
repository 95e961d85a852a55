"""The backlog of a request that is not streamed ends with its prefill, although no gateway sees its first token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.placement import Reservation
from coordinator.pool import prefills
from coordinator.pool.pool import Pool
from coordinator.pool.prefills import is_computed, predicted_s, prefill_tokens_per_s
from tests.coordinator.stage import KEYS, calls_of, chain, drained, hash_of, numbers, place, register, replica
from tests.coordinator.stream import Stream, followed, gains

QUICK = {"prefills": 3.0, "prefill_s": 1e-6, "prefill_computed_tokens": 1e6}
SLOW = {"prefills": 3.0, "prefill_s": 1e6, "prefill_computed_tokens": 1.0}


async def place_plain(pool: Pool, reservation: str, keys: list[str], **changes: Any) -> None:
    await place(pool, reservation, keys, is_streamed=False, **changes)


async def beat(pool: Pool, times: int = 1) -> None:
    """Sends heartbeats, and waits for the calls that they cause."""
    for _ in range(times):
        await pool.beat()
        await drained(pool)


# -- the decision ------------------------------------------------------------------------------------------------------


def test_a_prefill_is_predicted_from_its_own_tokens_and_those_that_are_queued() -> None:
    alone, behind_others = predicted_s(1000, 0, 1000.0), predicted_s(1000, 8000, 1000.0)
    assert alone > 1.0, "later than the mean, for what takes longer"
    assert alone + 1.0 < behind_others < alone + 8.0
    assert predicted_s(1000, -5, 1000.0) == alone


def test_what_is_held_too_long_does_not_make_the_next_be_held_for_ever_longer() -> None:
    """Prompts arrive as fast as the replica computes them. Each is held for the time predicted from the prompts held at
    its arrival."""
    held: list[tuple[float, int]] = []
    for second in range(10_000):
        held = [(until_s, tokens) for until_s, tokens in held if until_s > second]
        queued = sum(tokens for _, tokens in held)
        held.append((second + predicted_s(1000, queued, 1000.0), 1000))
    assert len(held) < 10


@pytest.mark.parametrize(
    "counters", [{}, {"prefill_s": 1.0}, {"prefill_computed_tokens": 5.0}, {"prefill_s": 0.0, "prefills": 1.0}]
)
def test_of_an_engine_that_has_not_told_no_speed_is_guessed(counters: dict[str, float]) -> None:
    assert prefill_tokens_per_s(counters) is None


@pytest.mark.parametrize(
    ("record", "computed"),
    [
        (b"life1 resident gpu 100 0 1 7 100 a11ce", True),
        (b"life1 resident gpu 100 0 1 6 100 a11ce", False),  # below the floor
        (b"life0 resident gpu 100 0 1 7 100 a11ce", False),
        (b"life1 claim gpu 100 0 1 gw0-1", False),
        (b"life1 resident gpu 100 0 1 x", False),
        (b"garbage", False),
        (b"", False),
        (None, False),
    ],
)
def test_a_prompt_is_computed_once_events_say_that_this_life_holds_its_tip(
    record: bytes | None, computed: bool
) -> None:
    assert is_computed(record, replace(replica("r0"), floor=7)) == computed


# -- on the store ------------------------------------------------------------------------------------------------------


async def test_a_prompt_that_events_confirm_is_no_backlog_any_more_while_its_answer_decodes(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    keys, other = chain(1, 2), chain(3)
    await followed(client)
    await place_plain(pool, "a", keys, pinned="r0")
    await place_plain(pool, "b", other, pinned="r0")
    await beat(pool, 2)
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 300}
    await stream.say(*gains(keys))
    await beat(pool)
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 100}
    assert await numbers(client, KEYS.active) == {"r0": 2}
    for one in ("a", "b"):
        pool.done(one)
    await drained(pool)
    assert set((await hash_of(client, KEYS.backlog_tokens)).values()) == {"0"}
    assert set((await hash_of(client, KEYS.active)).values()) == {"0"}


async def test_without_events_the_backlog_ends_after_the_time_that_its_prefill_takes_at_the_engines_speed(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 3)
    pool.prefills.observe("r0", QUICK)
    pool.prefills.observe("r1", SLOW)
    for name in ("r0", "r1", "r2"):  # r2 has not told its speed, so its time is not guessed
        await place_plain(pool, name, chain(name), pinned=name)
    await beat(pool)
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 100, "r1": 100, "r2": 100}
    await beat(pool)
    assert await numbers(client, KEYS.backlog_tokens) == {"r1": 100, "r2": 100}
    assert await numbers(client, KEYS.active) == {"r0": 1, "r1": 1, "r2": 1}
    pool.prefills.observe("r2", QUICK)
    await beat(pool, 2)
    assert await numbers(client, KEYS.backlog_tokens) == {"r1": 100}


async def test_what_was_placed_without_the_store_ends_its_backlog_likewise(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    pool.prefills.observe("r0", QUICK)
    pool.reassert()
    pool.adopt(Reservation("a", "r0", "life1", 70, "-", is_streamed=False))
    pool.reservations.count_adopted()
    await drained(pool)
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 70}
    await beat(pool, 3)
    assert await numbers(client, KEYS.backlog_tokens) == {}
    assert await numbers(client, KEYS.active) == {"r0": 1}


async def test_a_stream_ends_its_backlog_with_its_first_token_alone(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    await followed(client)
    pool.prefills.observe("r0", QUICK)
    await place(pool, "a", chain(1), pinned="r0")
    await stream.say(*gains(chain(1)))
    await client.config_resetstat()
    await beat(pool, 3)
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 100}
    assert (await calls_of(client))["hmget"] == 3, "one in each heartbeat, and none for it"


async def test_a_heartbeat_asks_for_no_more_tips_than_it_may(
    stream: Stream, pool: Pool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefills, "_LOOKUPS", 4)
    await followed(client)
    keys = [chain(n) for n in range(6)]
    for n, each in enumerate(keys):
        await place_plain(pool, f"id{n}", each, pinned="r0")
    await stream.say(*(gain for each in keys for gain in gains(each)))
    await beat(pool, 2)
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 200}, "the oldest first"
    await beat(pool)
    assert await numbers(client, KEYS.backlog_tokens) == {}


async def test_a_record_that_cannot_be_read_confirms_nothing_and_ends_no_heartbeat(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await followed(client)
    keys = chain(1)
    await place_plain(pool, "a", keys)
    await client.hset(KEYS.own(keys[-1]), "r0", "life1 resident gpu")
    await beat(pool, 2)
    assert await numbers(client, KEYS.backlog_tokens) == {"r0": 100}
