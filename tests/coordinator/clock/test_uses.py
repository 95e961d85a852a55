"""Redis' clock is set back or ahead: the order of uses is still known, and agents still find the chains they need."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from coordinator.maintenance.held_keys import AGENT_RETURNS_MS, CLAIM_TTL_MS, forget
from coordinator.maintenance.worker import Worker
from coordinator.pool.pool import Pool
from tests.coordinator.clock.stage import HOUR_MS, Clock
from tests.coordinator.stage import (
    KEYS,
    chain,
    chain_of,
    drained,
    hash_of,
    numbers,
    owners,
    place,
    replica,
    trim,
)

BIND_TTL_MS = 60_000
"""Of lua/place.lua."""
SAMPLED = 8
"""With this seed a use is sampled."""


async def held(client: redis.Redis, name: str = "r0") -> list[str]:
    """A replica's keys, least recently used first."""
    return list(await client.zrange(KEYS.held(name), 0, -1))


async def test_uses_after_a_step_back_follow_those_in_the_future_and_all_keep_their_order(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    for number in range(5):
        await place(pool, f"id{number}", chain(number, "end"), pinned="r0")
        await drained(pool)
        await clock.step(10)
    first, before = chain(0, "end"), await held(client)
    await clock.step(-HOUR_MS)
    await place(pool, "new", chain("new"), pinned="r0")
    await drained(pool)
    assert (await place(pool, "again", first, pinned="r0", seed=SAMPLED)).touch
    await drained(pool)
    assert await held(client) == [*(key for key in before if key not in first), *chain("new"), *reversed(first)]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 1100}


async def test_claims_with_a_use_in_the_future_go_where_an_agent_has_not_confirmed_them(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    await clock.follow("r0")
    for name in ("r0", "r1"):
        await place(pool, name, chain(name), pinned=name)
        pool.done(name)
    await place(pool, "runs", chain("runs"), pinned="r0")
    await drained(pool)
    maintenance = Worker(pool)
    await maintenance.tick()
    await clock.step(-HOUR_MS)
    await clock.follow("r0")
    await maintenance.tick()
    assert await owners(client, chain("r0")[0]) == {}, "no event confirmed the claim"
    assert list(await owners(client, chain("runs")[0])) == ["r0"]
    assert list(await owners(client, chain("r1")[0])) == ["r1"]


async def test_a_replica_that_was_registered_in_the_future_keeps_what_it_is_given(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    """Keys last used before the replica's registration belong to an earlier life. After the step back, no new use gets
    such a time. The order of uses stays."""
    await pool.register(replica("r0", "life2"))
    await clock.step(-HOUR_MS)
    for number in range(3):
        await place(pool, f"id{number}", chain(number), pinned="r0")
        await drained(pool)
    again = await place(pool, "again", chain(0), pinned="r0", seed=SAMPLED)
    await drained(pool)
    assert again.touch
    fleet = await pool.beat()
    assert await trim(pool, fleet.replicas["r0"], fleet) == 0
    assert await held(client) == [*chain(1), *chain(2), *chain(0)]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 300}


async def test_a_dead_replica_is_forgotten_with_keys_that_were_used_in_the_future(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    await place(pool, "a", chain(1), pinned="r0")
    await pool.register(replica("r1", "life2", state="dead"))
    await pool.register(replica("r0", state="dead"))
    await drained(pool)
    await clock.step(-HOUR_MS)
    fleet = await pool.beat()
    for name in ("r0", "r1"):
        assert await forget(pool, fleet.replicas[name])
    assert await hash_of(client, KEYS.replicas) == {}


async def test_an_hour_that_passed_at_once_makes_no_claim_old(pool: Pool, client: redis.Redis, clock: Clock) -> None:
    await place(pool, "a", chain(1), pinned="r0")
    await drained(pool)
    for jump_ms in (CLAIM_TTL_MS + 60_000, 2000):
        await clock.step(jump_ms)
        fleet = await pool.beat()
        assert await trim(pool, fleet.replicas["r0"], fleet) == 0
    for _ in range(2):  # this time heartbeats go on meanwhile
        await clock.step(CLAIM_TTL_MS)
        await client.hset(KEYS.leases, "tick", await clock.now_ms())
    fleet = await pool.beat()
    assert await trim(pool, fleet.replicas["r0"], fleet) == 1


async def test_an_agent_that_the_clock_made_late_has_only_just_gone(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    """The worker does not trim the replica's keys to its size before the agent had time to return. When the clock is
    set back again, the agent counts as away for as long as before."""
    await pool.register(replica("r0", capacity_tokens=100))
    await clock.follow("r0")
    await place(pool, "a", chain(1, 2), pinned="r0")
    await drained(pool)
    await clock.step(HOUR_MS)
    await Worker(pool).tick()
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 200}
    await clock.step(-HOUR_MS)
    gone_ms = await clock.now_ms() - AGENT_RETURNS_MS - 5000
    await client.hset(KEYS.agents, "r0", f"agent0 life1 {gone_ms} session 0 0 -1")
    await Worker(pool).tick()
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}


@pytest.mark.parametrize("turns_back", [1, 2, 59, 60])
async def test_chains_are_kept_for_their_agents_when_turns_go_back(
    pool: Pool, client: redis.Redis, clock: Clock, turns_back: int
) -> None:
    ttl_ms = BIND_TTL_MS
    await place(pool, "a", chain(1))
    await clock.step(-turns_back * ttl_ms)
    await place(pool, "b", chain(2))
    await clock.step(ttl_ms)
    await place(pool, "c", chain(3))
    assert all([await chain_of(client, chain(number)[0]) for number in (1, 2, 3)])
    for number in range(4, 7):
        await clock.step(ttl_ms)
        await place(pool, f"id{number}", chain(number))
    assert await chain_of(client, chain(1)[0]) is None, "they are not kept for ever"


OLDER_WRITE_DOWN = """
local turn = string.format('%d', math.floor(ARGV[1] / ARGV[2]))
local slot = KEYS[1] .. ':' .. turn % 2
local stands = redis.call('HGET', slot, '@')
if stands ~= turn then
  if tonumber(stands or 0) < tonumber(turn) then
    redis.call('UNLINK', slot)
  end
  redis.call('HSET', slot, '@', turn)
end
redis.call('HSET', slot, ARGV[3], 'chain')
"""
"""How gateways of an older version write chains down. They share the records during an upgrade."""


@pytest.mark.parametrize("is_full", [False, True])
async def test_gateways_of_two_versions_keep_chains_for_a_turn(
    pool: Pool, client: redis.Redis, clock: Clock, is_full: bool
) -> None:
    ttl_ms, placed = BIND_TTL_MS, list[str]()
    for number in range(8):
        written = [chain(number)[0], f"older{number}"]
        for tip in written if number % 3 else reversed(written):
            if tip.startswith("older"):
                await client.eval(OLDER_WRITE_DOWN, 1, KEYS.bound, await clock.now_ms(), ttl_ms, tip)
            else:
                await place(pool, f"id{number}", chain(number))
        placed += written
        assert all([await chain_of(client, tip) for tip in placed[-2 if is_full else -4 :]]), number
        await clock.step(ttl_ms)
        if is_full:
            await client.hset(KEYS.bound_slot(number % 2), "@bytes", 10**9)


async def test_reused_blocks_are_asked_for_though_they_were_last_asked_for_in_the_future(
    pool: Pool, client: redis.Redis, clock: Clock
) -> None:
    async def asked(number: int) -> bool:
        await clock.follow("r0", is_relearning=1)
        return (await place(pool, f"id{number}", chain(number), pinned="r0")).report

    assert await asked(1)
    await clock.step(-HOUR_MS)
    assert await asked(2)
