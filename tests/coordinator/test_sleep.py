"""A replica that sleeps gets no request at all, until it is awake again."""

from __future__ import annotations

import re

import pytest
import redis.asyncio as redis

from coordinator.maintenance.held_keys import due, look_at
from coordinator.pool.draining import drain
from coordinator.pool.pool import Pool
from coordinator.registry import ASLEEP
from tests.coordinator.stage import KEYS, beaten, chain, drained, hash_of, place, register, replica, request
from tests.coordinator.test_draining import LARGE, state_of


async def change(pool: Pool, name: str, before: str, after: str) -> None:
    pool.change_state(name, "life1", before, after)
    await drained(pool)


@pytest.mark.parametrize("count", [3, LARGE])
async def test_no_request_goes_there_not_even_one_that_can_go_nowhere_else(pool: Pool, count: int) -> None:
    names = await register(pool, count)
    await place(pool, "a", chain("prompt"), pinned="r1")
    await change(pool, "r1", "ready", ASLEEP)
    chosen = {(await place(pool, f"same{i}", chain("prompt"))).replica for i in range(count)}
    assert chosen <= set(names) - {"r1"}
    assert await pool.place(request("pinned", chain("prompt"), pinned="r1")) is None
    assert await pool.place(request("alone", chain(1), tried=[name for name in names if name != "r1"])) is None
    await change(pool, "r1", ASLEEP, "ready")
    assert (await place(pool, "b", chain("prompt"), pinned="r1")).replica == "r1"


async def test_for_gateways_that_do_not_know_sleep_it_is_drained(pool: Pool, client: redis.Redis) -> None:
    """They find it well, register it as ready, and compare the first word of its drain with its incarnation."""
    await register(pool, 1)
    await change(pool, "r0", "ready", ASLEEP)
    drains = await hash_of(client, KEYS.draining)
    assert re.fullmatch(r"life1 \d+ asleep", drains["r0"])
    await pool.register(replica("r0"))
    assert await state_of(client, "r0") == ASLEEP
    await client.hset(KEYS.replicas, "r0", replica("r0", state="draining").text)
    await change(pool, "r0", "draining", "ready")
    assert await state_of(client, "r0") == "ready"


async def test_it_was_away_and_sleeps_still(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await change(pool, "r0", "ready", ASLEEP)
    for state in ("dead", "ready", "dead"):
        await pool.register(replica("r0", state=state))
    assert await state_of(client, "r0") == "dead"
    await change(pool, "r0", "dead", "ready")
    assert await state_of(client, "r0") == ASLEEP
    await pool.register(replica("r0", "life2"))
    assert await state_of(client, "r0") == "ready"


async def test_a_drain_outlasts_sleep_and_ends_in_it(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 3)
    await drain(pool.run, "r0")
    await change(pool, "r0", "draining", ASLEEP)
    for name in ("r1", "r2"):
        await change(pool, name, "ready", ASLEEP)
        assert (await drain(pool.run, name)).state == ASLEEP
    await drain(pool.run, "r2", is_over=True)
    for name in ("r0", "r1", "r2"):
        await change(pool, name, ASLEEP, "ready")
    assert [await state_of(client, name) for name in ("r0", "r1", "r2")] == ["draining", "draining", "ready"]


async def test_what_it_held_is_forgotten_while_requests_wait_there_still(pool: Pool) -> None:
    await register(pool, 1)
    await place(pool, "a", chain(1, 2))
    await drained(pool)
    await change(pool, "r0", "ready", ASLEEP)
    state, [look] = await beaten(pool), await look_at(pool, ["r0"])
    task, _ = due(pool, state.replicas["r0"], look, state, None)
    while not await task.do_piece():
        pass
    await change(pool, "r0", ASLEEP, "ready")
    assert (await place(pool, "b", chain(1, 2))).matched_keys == 0
