"""Which replica a placement chooses, and which reason it gives."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import redis.asyncio as redis

from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from tests.coordinator.stage import (
    KEYS,
    chain,
    drained,
    numbers,
    own,
    owners,
    place,
    register,
    replica,
    request,
)

KNOBS = PolicyKnobs()


async def test_on_an_idle_cluster_a_deepest_owner_is_always_chosen(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 6)
    keys = chain(*range(12))
    for depth, name in ((3, "r1"), (8, "r2"), (8, "r4"), (5, "r5")):
        for key in keys[:depth]:
            await own(client, key, name)
    for seed in range(25):
        placed = await place(pool, "a", keys, seed=seed)
        assert placed.replica in {"r2", "r4"}
        assert (placed.why, placed.matched_keys, placed.matched_tokens) == ("hit", 8, 800)
        assert placed.backlog_tokens == 400
        await restore(pool, client, placed.replica, keys[8:])


async def restore(pool: Pool, client: redis.Redis, name: str, claimed: list[str]) -> None:
    """Undoes a placement's changes, so that the next one sees the same state."""
    pool.done("a")
    for key in claimed:
        await client.hdel(KEYS.own(key), name)
    await client.hdel(KEYS.owned_tokens, name)
    await drained(pool)


async def test_a_shared_prefix_is_not_enough_to_leave_its_owner_while_everybody_is_idle(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 4, capacity_tokens=1_000_000)
    keys = chain("system", "question")
    await own(client, keys[0], "r3", hits=10_000)
    assert (await place(pool, "a", keys)).replica == "r3"


async def test_a_full_cache_does_not_drive_a_prompt_from_its_owner_while_everybody_is_idle(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 3, capacity_tokens=1000)
    keys = chain("system", *range(8))
    await own(client, keys[0], "r1", hits=10_000)
    await client.hset(KEYS.owned_tokens, "r1", 1000)
    assert (await place(pool, "a", keys)).replica == "r1"


async def test_a_cold_prompt_goes_where_it_displaces_least(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 3, capacity_tokens=1000)
    await client.hset(KEYS.owned_tokens, mapping={"r0": 950, "r1": 600, "r2": 990})
    placed = await place(pool, "a", chain(*range(5)))
    assert (placed.replica, placed.why) == ("r1", "cold")


async def test_a_cold_prompt_goes_to_the_fewest_owned_tokens_where_every_cache_has_room(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 3, capacity_tokens=100_000)
    await client.hset(KEYS.owned_tokens, mapping={"r0": 950, "r1": 990, "r2": 600})
    assert (await place(pool, "a", chain(1))).replica == "r2"


async def test_the_reply_names_the_url_and_the_incarnation(pool: Pool) -> None:
    pool.register(replica("r0", "life7"))
    placed = await place(pool, "a", chain(1))
    assert (placed.replica, placed.incarnation, placed.url) == ("r0", "life7", "http://r0.test:8000")


async def test_a_follow_up_stays_where_the_answer_before_it_was_made(pool: Pool, client: redis.Redis) -> None:
    """No key tells who holds an answer, because keys are made of prompts. Here the answer is most of what r0 holds."""
    await register(pool, 2)
    keys = chain("system", "question", "answer", "next question")
    for name, depth in (("r0", 2), ("r1", 1)):
        for key in keys[:depth]:
            await own(client, key, name)
    await client.hset(KEYS.backlog_tokens, "r0", 1000)
    asked = request("a", keys, tokens=[1000, 1010, 3000, 3020], prompt_tokens=3020)
    chosen = [json.loads(await pool.explain(replace(asked, answer=at)) or b"")["replica"] for at in ((2, 3), (0, 0))]
    assert chosen == ["r0", "r1"]
    await own(client, keys[1], "r0", hits=16)
    asked = replace(asked, answer=(2, 3))
    others = "many go on after this question, so whose answer it is cannot be told"
    assert json.loads(await pool.explain(asked) or b"")["replica"] == "r1", others


async def test_an_answer_that_the_map_knows_in_part_counts_as_a_whole(pool: Pool, client: redis.Redis) -> None:
    """As after a prefilled answer: who holds its beginning has made the rest."""
    await register(pool, 2)
    keys = chain(*range(6))
    for name, depth in (("r0", 4), ("r1", 2)):
        for key in keys[:depth]:
            await own(client, key, name)
    asked = request("a", keys, tokens=[1000, 1010, 1270, 4000, 9000, 9020], prompt_tokens=9020, answer=(2, 5))
    told = json.loads(await pool.explain(asked) or b"")["replicas"]
    assert {one["replica"]: one["credit_tokens"] for one in told} == {"r0": 9000, "r1": 9000}


async def test_a_shallower_owner_is_a_partial_hit(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    keys = chain(*range(10))
    for name, depth in (("r0", 9), ("r1", 7)):
        for key in keys[:depth]:
            await own(client, key, name)
    await client.hset(KEYS.backlog_tokens, "r0", 5000)
    placed = await place(pool, "a", keys)
    assert (placed.replica, placed.why, placed.matched_keys) == ("r1", "partial_hit", 7)


async def test_the_cap_on_active_requests_holds_while_another_is_below(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    keys = chain(*range(50))
    for key in keys:
        await own(client, key, "r0")
    await client.hset(KEYS.active, "r0", 3)
    assert (await place(pool, "a", keys, knobs=replace(KNOBS, max_active_requests=3))).replica == "r1"


async def test_a_stale_incarnation_is_never_matched(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2, incarnation="life1")
    keys = chain(*range(4))
    for key in keys:
        await own(client, key, "r0", "life0")
    await own(client, keys[0], "r1", "life1")
    placed = await place(pool, "a", keys)
    assert (placed.replica, placed.matched_keys) == ("r1", 1)
    assert [list(await owners(client, key)) for key in keys] == [["r1"]] * 4


async def test_an_owner_that_nobody_registered_is_never_chosen(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    keys = chain(1)
    await own(client, keys[0], "ghost")
    placed = await place(pool, "a", keys)
    assert (placed.replica, placed.matched_keys) == ("r0", 0)
    assert list(await owners(client, keys[0])) == ["r0"]


async def test_a_hot_prefix_gains_owners_as_its_owner_fills(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 4, capacity_tokens=1_000_000)
    system = [f"system{i}" for i in range(40)]
    owned_by = []
    for i in range(60):
        await place(pool, f"id{i}", chain(*system, f"question {i}"), seed=i * 7919)
        pool.first_token(f"id{i}")
        owned_by.append(len(await owners(client, chain(*system)[-1])))
    assert owned_by[0] == 1
    assert owned_by == sorted(owned_by)
    assert owned_by[-1] == 4
    active = await numbers(client, KEYS.active)
    assert sum(active.values()) == 60
    assert max(active.values()) - min(active.values()) <= 8


async def test_a_prefix_that_only_one_conversation_used_stays_with_its_owner_for_longer(
    pool: Pool, client: redis.Redis
) -> None:
    await register(pool, 2, capacity_tokens=1_000_000)
    shared, private = chain("system", *range(30)), chain("private", *range(30))
    for key in shared:
        await own(client, key, "r0", hits=800)
    for key in private:
        await own(client, key, "r0")
    await client.hset(KEYS.backlog_tokens, "r0", 1000)
    assert (await place(pool, "a", [*shared, *chain("question 1")])).replica == "r1"
    pool.done("a")
    await drained(pool)
    assert (await place(pool, "b", [*private, *chain("question 2")])).replica == "r0"


async def test_a_placement_is_one_call(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 2)
    await place(pool, "first", chain(2))  # declares its subset of the replicas
    await drained(pool)
    sent = []
    wire = pool.link.wire
    assert wire is not None
    original = wire._enqueue
    wire._enqueue = lambda call, command: (sent.append(command[0]), original(call, command))[1]  # type: ignore[method-assign, assignment, func-returns-value]
    await place(pool, "a", chain(1))
    assert sent == ["EVALSHA"]
    await asyncio.sleep(0)
    assert sent == ["EVALSHA", "EVALSHA"]  # the `hold` call is sent after it, without waiting


async def test_of_caches_that_are_full_none_is_spared_for_ever(pool: Pool, client: redis.Redis) -> None:
    """One replica is believed to hold more tokens than the others, and more than its capacity."""
    await register(pool, 3, capacity_tokens=1000)
    await client.hset(KEYS.owned_tokens, mapping={"r0": 1400, "r1": 990, "r2": 1010})
    chosen = set()
    for number in range(60):
        placed = await place(pool, f"a{number}", chain(f"new {number}"), seed=number * 7919)
        chosen.add(placed.replica)
        pool.done(f"a{number}")
        await drained(pool)
        await client.hset(KEYS.owned_tokens, mapping={"r0": 1400, "r1": 990, "r2": 1010})
    assert chosen == {"r0", "r1", "r2"}
