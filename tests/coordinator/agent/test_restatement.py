"""An agent says everything again: in pieces, with events between them."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from coordinator.agent import restatement as restatement_module
from coordinator.agent.residency import Evicted, Resident
from coordinator.agent.restatement import REST_S_AN_AGENT, Restatement
from coordinator.pool.engine_feedback import is_unchanged
from coordinator.pool.pool import Pool
from tests.coordinator.stage import KEYS, chain, owners, place
from tests.coordinator.stream import Stream, attend, gains, linked, losses
from tests.redis_server import RedisServer

OLD, KEPT = chain("old"), chain(*range(5))


class Holding:
    """What an engine holds, as far as a restatement asks."""

    def __init__(self, residents: list[Resident]) -> None:
        self.by_key = {each.key: each for each in residents}

    def residents(self) -> list[Resident]:
        return list(self.by_key.values())

    def find(self, key: str) -> Resident | None:
        return self.by_key.get(key)

    def evict(self, keys: list[str]) -> list[Evicted]:
        for key in keys:
            del self.by_key[key]
        return losses(keys)

    def gain(self, keys: list[str]) -> list[Resident]:
        found = gains(keys)
        self.by_key |= {each.key: each for each in found}
        return found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restatement_module, "PIECE", 2)


async def test_what_is_not_said_again_is_void_and_all_else_counts(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    await stream.say(*gains([*OLD, *KEPT]))
    again = Restatement(Holding(gains(KEPT)), 0.0, 1)  # type: ignore[arg-type]
    assert [await again.publish_piece(stream.link, 7, 0.0, 1) for _ in range(3)] == [False, False, True]
    assert (await place(pool, "a", OLD, pinned="r0")).matched_keys == 0
    assert (await place(pool, "b", KEPT, pinned="r0")).matched_keys == len(KEPT)
    assert (await client.hget(KEYS.agents, "r0")).endswith(" 7"), "the engine's batch of which everything is said"


async def test_events_between_two_pieces_have_the_last_word(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    holding = Holding(gains(KEPT))
    again = Restatement(holding, 0.0, 1)  # type: ignore[arg-type]
    await again.publish_piece(stream.link, 7, 0.0, 1)
    assert (await client.hget(KEYS.agents, "r0")).endswith(" -1"), "the next agent does not count on half of it"
    new = chain("new")
    await stream.say(*holding.evict([KEPT[0], KEPT[4]]), *holding.gain(new))
    while not await again.publish_piece(stream.link, 7, 0.0, 1):
        pass
    assert [list(await owners(client, key)) for key in (KEPT[0], KEPT[4])] == [[], []]
    assert (await place(pool, "a", new, pinned="r0")).matched_keys == 1
    assert [list(await owners(client, key)) for key in KEPT[1:4]] == [["r0"]] * 3


async def test_a_replica_that_holds_nothing_says_so(stream: Stream, pool: Pool) -> None:
    await stream.say(*gains(OLD))
    assert await Restatement(Holding([]), 0.0, 1).publish_piece(stream.link, 7, 0.0, 1)  # type: ignore[arg-type]
    assert (await place(pool, "a", OLD, pinned="r0")).matched_keys == 0


async def test_the_more_agents_say_everything_again_the_more_each_rests(stream: Stream) -> None:
    again = Restatement(Holding(gains(KEPT)), 100.0, 1000, draw=lambda: 0.5)  # type: ignore[arg-type]
    assert again.due_s == 100 + 500 * REST_S_AN_AGENT
    await again.publish_piece(stream.link, 7, 200.0, 1000)
    assert again.due_s == 200 + 1000 * REST_S_AN_AGENT
    await again.publish_piece(stream.link, 7, 300.0, 1)
    assert again.due_s == 300 + REST_S_AN_AGENT


async def test_heartbeats_tell_how_many_agents_say_everything_again(
    stream: Stream, pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    async with linked(redis_server.url, "r1", "agent1") as other:
        assert (await attend(other, is_restating=True)).restating == 1
        assert (await attend(stream.link, is_restating=True)).restating == 2
        assert (await attend(other)).restating == 1
        await attend(stream.link, leaving=True)
        assert (await attend(other)).restating == 0


async def test_while_everything_is_said_again_no_miss_makes_an_agent_begin_anew(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    [key] = OLD
    await stream.say(*gains([key]))
    await pool.beat()
    assert await is_unchanged(pool, "r0", key, "1")
    await attend(stream.link, is_restating=True)
    assert not await is_unchanged(pool, "r0", key, "1")
