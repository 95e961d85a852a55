"""Which ownership records a placement writes, and which it leaves alone."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.pool.placed_chains import read_chains
from coordinator.pool.pool import Pool
from tests.coordinator.stage import (
    KEYS,
    calls_of,
    chain,
    chain_of,
    drained,
    dump,
    now_ms,
    numbers,
    own,
    owners,
    place,
    register,
    request,
)

TOUCH_MS, BIND_TTL_MS = 10_000, 60_000
"""As in lua/place.lua."""


async def test_a_cold_prompt_is_claimed_from_root_to_tip(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    keys = chain(*range(5))
    before = await now_ms(client)
    placed = await place(pool, "res-1", keys)
    assert placed.claimed_from == 1
    for key in keys:
        record = (await owners(client, key))["r0"]
        assert record[:5] == ["life1", "claim", "gpu", "100", "0"]
        assert before <= int(record[5]) <= await now_ms(client)
        assert record[6] == "res-1"
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 500}


async def test_only_what_lies_below_the_match_is_claimed(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "first", chain(1, 2, 3))
    placed = await place(pool, "second", chain(1, 2, 3, 4, 5))
    assert (placed.matched_keys, placed.claimed_from) == (3, 4)
    claimed_by = [(await owners(client, key))["r0"][6] for key in chain(1, 2, 3, 4, 5)]
    assert claimed_by == ["first", "first", "first", "second", "second"]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 500}


async def test_spans_are_the_differences_of_the_tokens_behind_the_keys(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    keys = chain(1, 2, 3)
    await place(pool, "a", keys, tokens=[10, 10, 35], prompt_tokens=40)
    assert [(await owners(client, key))["r0"][3] for key in keys] == ["10", "0", "25"]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 35}


async def test_claimed_keys_are_held_by_their_replica_shallow_ones_for_longer(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    keys = chain(*range(8))
    await place(pool, "a", keys)
    await drained(pool)
    assert await client.zrevrange(KEYS.held("r0"), 0, -1) == keys


async def test_a_claim_writes_its_chain_down(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    keys = chain(1, 2, 3)
    shape = b'{"text_bytes":[3,5,9]}'
    await place(pool, "a", keys, prompt_tokens=310, shape=shape)
    assert await chain_of(client, keys[-1]) == " ".join(["r0", "life1", "0", "310", shape.decode(), *keys])


async def test_what_was_written_down_two_turns_ago_is_forgotten(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    turn = await now_ms(client) // BIND_TTL_MS
    for slot in (0, 1):
        # One of the two turns is the previous one, the other is the turn before that.
        await client.hset(KEYS.bound_slot(slot), mapping={"@": turn - 1 - (turn - 1 - slot) % 2, f"tip{slot}": "old"})
    await place(pool, "a", chain(1))
    now = (await now_ms(client) // BIND_TTL_MS) % 2
    assert await chain_of(client, chain(1)[0]) is not None
    assert (await chain_of(client, f"tip{now}"), await chain_of(client, f"tip{1 - now}")) == (None, "old")


async def test_chains_that_come_fast_take_shorter_turns_and_the_oldest_go(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    for number in range(5):
        await place(pool, f"id{number}", chain(number))
        there = [await chain_of(client, chain(each)[0]) is not None for each in range(number + 1)]
        assert there == [each >= number - 1 for each in range(number + 1)]
        newest_first = await read_chains(pool.read, KEYS, [chain(number)[0]])
        assert newest_first[0] is not None
        turn = await now_ms(client) // BIND_TTL_MS
        for slot in (0, 1):
            assert int(await client.hget(KEYS.bound_slot(slot), "@") or 0) <= turn + 1, "the clock did not go back"
            await client.hset(KEYS.bound_slot(slot), "@bytes", 128 * 1024 * 1024)


async def test_what_was_written_down_last_is_what_is_read(pool: Pool, client: redis.Redis) -> None:
    await client.hset(KEYS.bound_slot(0), mapping={"@": 8, "both": "new", "one": "old"})
    await client.hset(KEYS.bound_slot(1), mapping={"@": 7, "both": "old", "other": "old"})
    assert await read_chains(pool.read, KEYS, ["both", "one", "other", "none"]) == [b"new", b"old", b"old", None]


async def test_a_warm_prompt_writes_its_reservation_and_nothing_else(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 3)
    keys = chain(*range(40))
    await place(pool, "cold", keys)
    await drained(pool)
    before = await dump(client, "*:own:*", "*:held:*", "*:bound:*", "*:owned_tokens")
    await client.config_resetstat()
    placed = await place(pool, "warm", keys, seed=8)  # with this seed a hit would be counted
    await drained(pool)
    calls = await calls_of(client)
    assert (placed.matched_keys, placed.claimed_from, placed.touch) == (40, 0, False)
    assert {name: calls.get(name, 0) for name in ("hset", "hincrby", "set", "zadd", "hdel")} == {
        "hset": 1,
        "hincrby": 1,
        "set": 0,
        "zadd": 0,
        "hdel": 0,
    }
    assert await dump(client, "*:own:*", "*:held:*", "*:bound:*", "*:owned_tokens") == before


async def test_every_owner_of_a_key_is_recorded(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 40)
    keys = chain("system", "more")
    for i in range(40):
        await place(pool, f"id{i}", keys, pinned=f"r{i}")
    assert [len(await owners(client, key)) for key in keys] == [40, 40]
    assert set((await numbers(client, KEYS.owned_tokens)).values()) == {200}


async def test_records_of_dead_incarnations_are_removed_where_they_are_met(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2, incarnation="life2")
    keys = chain(*range(6))
    for key in keys:
        await own(client, key, "r0", "life1")
    await own(client, keys[1], "r1", "life2")
    assert (await place(pool, "a", keys[:5], pinned="r1")).matched_keys == 2
    left = [list(await owners(client, key)) for key in keys]
    assert left[1:5] == [["r1"]] * 4
    assert left[5] == ["r0"]  # not on this chain
    assert await numbers(client, KEYS.owned_tokens) == {"r1": 300}


async def test_the_claim_of_a_former_life_is_claimed_anew(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    keys = chain(1, 2, 3)
    for key in keys:
        await own(client, key, "r0", "life0")
        await own(client, key, "r1")
    placed = await place(pool, "a", keys, pinned="r0")
    assert placed.claimed_from == 1
    assert [(await owners(client, key))["r0"][0] for key in keys] == ["life1"] * 3
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 300}


async def test_a_hit_by_another_continuation_is_counted_once_in_eight_for_eight(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 1)
    await place(pool, "first", chain("system", "a"))
    tip = chain("system")[0]
    for seed in range(1, 33):
        await place(pool, f"id{seed}", chain("system", f"q{seed}"), seed=seed)
    assert (await owners(client, tip))["r0"][4] == "32"


async def test_a_full_match_is_no_hit_by_another(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    keys = chain("system", "a")
    for seed in range(0, 64, 8):
        await place(pool, f"id{seed}", keys, seed=seed)
    assert [(await owners(client, key))["r0"][4] for key in keys] == ["0", "0"]


async def test_the_last_use_is_written_at_most_once_in_ten_seconds(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    keys = chain(1, 2)
    used = await now_ms(client) - TOUCH_MS + 5_000
    for key in keys:
        await own(client, key, "r0", last_use_ms=used)
    fresh = await place(pool, "a", keys)
    assert (fresh.touch, fresh.last_use_ms) == (False, used)
    assert (await owners(client, keys[1]))["r0"][5] == str(used)

    used -= 5_001
    for key in keys:
        await own(client, key, "r0", hits=16, last_use_ms=used)
    due = await place(pool, "b", keys)
    again = await place(pool, "c", keys)
    await drained(pool)
    assert (due.touch, due.last_use_ms) == (True, used)
    assert (again.touch, again.last_use_ms >= used + TOUCH_MS) == (False, True)
    shallow, deep = (await owners(client, keys[0]))["r0"], (await owners(client, keys[1]))["r0"]
    assert shallow[5] == str(used)
    assert deep[:5] == ["life1", "claim", "gpu", "100", "16"]
    assert deep[5:] == [str(again.last_use_ms), "other"]
    assert await client.zrevrange(KEYS.held("r0"), 0, -1) == keys


async def test_claims_of_a_failed_attempt_are_withdrawn_and_others_are_not(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "first", chain(1, 2))
    asked = request("second", chain(1, 2, 3, 4))
    placed = await pool.place(asked)
    assert placed is not None
    pool.claims.withdraw(asked, placed)
    await drained(pool)
    assert [list(await owners(client, key)) for key in chain(1, 2, 3, 4)] == [["r0"], ["r0"], [], []]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
    assert await client.zrevrange(KEYS.held("r0"), 0, -1) == chain(1, 2)


async def test_withdrawing_twice_changes_nothing_more(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    asked = request("a", chain(1, 2))
    placed = await pool.place(asked)
    assert placed is not None
    pool.claims.withdraw(asked, placed)
    pool.claims.withdraw(asked, placed)
    await drained(pool)
    assert await numbers(client, KEYS.owned_tokens) == {}


async def test_a_placement_that_claimed_nothing_withdraws_nothing(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(1, 2))
    asked = request("b", chain(1, 2))
    placed = await pool.place(asked)
    assert placed is not None
    pool.claims.withdraw(asked, placed)
    await drained(pool)
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
