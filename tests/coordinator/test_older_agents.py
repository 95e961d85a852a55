"""What agents before version 0.2 publish reaches the map by maintenance, once and in order."""

from __future__ import annotations

import redis.asyncio as redis

from coordinator.maintenance.older_agents import unapplied
from coordinator.maintenance.worker import Worker
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, chain, dump, hash_of, numbers, owners, replica
from tests.coordinator.stream import RESET, Stream, apply_older, attend, gains, losses, say_as_an_older_agent

MAP = ("*:own:*", "*:owned_tokens", "*:held:*", "*:replicas")


async def test_maintenance_applies_it(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    old, new = chain("old"), chain("new")
    await say_as_an_older_agent(client, gains(old))
    await say_as_an_older_agent(client, [*losses(old), *gains(new)])
    await Worker(pool).tick()
    assert [list(await owners(client, key)) for key in (*old, *new)] == [[], ["r0"]]
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 100}


async def test_nothing_is_applied_twice(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    await say_as_an_older_agent(client, gains(chain(1)))
    await apply_older(pool, ["r0", "r1"])
    before = await dump(client, "kvgate:*")
    await apply_older(pool, ["r0", "r1"])
    assert await dump(client, "kvgate:*") == before
    cursor = (await hash_of(client, KEYS.cursors))["r0"]
    arguments = {"stream_id": cursor.split(" ")[0], "number": "1", "incarnation": "life1"}
    late = {**arguments, "replica": "r0", "known_cursor": "", "keys": chain(1), "transitions": ["- " + chain(1)[0]]}
    assert await pool.run("apply", **late) == 0, "another gateway was faster"
    assert await dump(client, "kvgate:*") == before


async def test_what_an_agent_of_this_version_says_needs_no_maintenance(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    await stream.say(*gains(chain(1)))
    before = await dump(client, *MAP, "*:cursors")
    await apply_older(pool, ["r0", "r1"])
    assert await dump(client, *MAP, "*:cursors") == before


async def test_entries_that_the_cap_cut_off_void_what_was_said_before(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    for number in range(3):
        await say_as_an_older_agent(client, gains(chain(number)))
    await client.xtrim(KEYS.events("r0"), maxlen=1, approximate=False)
    await apply_older(pool, ["r0", "r1"])
    assert (await attend(stream.link)).asked == "restate"
    assert (await pool.beat()).replicas["r0"].floor == 3


async def test_an_entry_that_no_agent_wrote_is_taken_out_and_what_follows_is_applied(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    await client.xadd(KEYS.events("r0"), {"n": "one"})
    await say_as_an_older_agent(client, gains(chain(1)))
    await apply_older(pool, ["r0", "r1"])
    assert list(await owners(client, chain(1)[0])) == ["r0"]
    assert await client.xlen(KEYS.events("r0")) == 1


async def test_an_entry_of_a_past_life_only_moves_the_cursor(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    await say_as_an_older_agent(client, [RESET])
    await pool.register(replica("r0", "life2"))
    before = await dump(client, *MAP)
    await apply_older(pool, ["r0", "r1"])
    assert await dump(client, *MAP) == before
    assert (await hash_of(client, KEYS.cursors))["r0"].endswith(" 1")


async def test_many_entries_take_many_pieces_and_a_cursor_that_cannot_be_read_stops_no_task(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    for number in range(7):
        await say_as_an_older_agent(client, gains(chain(number)))
    await client.hset(KEYS.cursors, "r0", "garbage 0")
    [task] = await unapplied(pool, ["r0"])
    pieces = 1
    while not await task.do_piece():
        pieces += 1
    assert pieces == 4
    assert await numbers(client, KEYS.owned_tokens) == {"r0": 700}
    assert await unapplied(pool, ["r0"]) == []
