"""An agent's heartbeat and its published entries: each replica has one agent at a time, and each agent learns news
once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis.asyncio as redis

from coordinator.agent import agent_store
from coordinator.agent.agent_store import AgentStore, Attended, Fenced, Measured
from coordinator.agent.engine_session import Handover
from coordinator.errors import StoreDown
from coordinator.pool.engine_feedback import ask_reset, tell_measured
from coordinator.pool.pool import Pool
from coordinator.registry import GOOD_MS, AgentRecord, ReplicaRecord
from tests.coordinator.stage import KEYS, chain, drained, dump, hash_of, now_ms, register, replica, request
from tests.coordinator.stream import (
    VITALS,
    Stream,
    attend,
    followed,
    gains,
    linked,
    losses,
    say_all,
)
from tests.redis_server import RedisServer


async def expire_lease(client: redis.Redis, name: str = "r0") -> None:
    agent, incarnation, _, *rest = (await hash_of(client, KEYS.agents))[name].split(" ")
    text = " ".join([agent, incarnation, str(await now_ms(client) - 1), *rest])
    await client.hset(KEYS.agents, name, text)


async def test_a_heartbeat_records_what_the_agent_knows(
    pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    async with linked(redis_server.url) as link:
        answer = await attend(link, mode="session", is_relearning=True, waiting=3, seq=41, counters={"hits": 7.0})
        assert (answer.before, answer.asked, answer.measured) == (None, "", [])
        until_ms = (await now_ms(client)) + agent_store.LEASE_MS
        record = AgentRecord.parse((await hash_of(client, KEYS.agents))["r0"])
        assert until_ms - 2000 <= record.lease_until_ms <= until_ms
        assert (record.agent, record.incarnation, record.mode) == ("agent0", "life1", "session")
        assert (record.is_relearning, record.waiting, record.seq) == (True, 3, 41)
        fleet = await pool.beat()
        assert fleet.agents == {"r0": replace(record, lease_until_ms=GOOD_MS, waiting=0, seq=-1)}
        await pool.read_figures()
        assert pool.figures.engines == {"r0": {"hits": 7.0}}
        assert fleet.is_exact("r0")


async def test_a_capacity_that_is_less_than_the_engine_holds_is_raised(stream: Stream, client: redis.Redis) -> None:
    record = ReplicaRecord.parse("r0", (await hash_of(client, KEYS.replicas))["r0"])
    for told, held, wanted in ((0, 90, 0), (1000, 1000, 1000), (1000, 1016, 1016)):
        await client.hset(KEYS.replicas, "r0", replace(record, capacity_tokens=told).text)
        await attend(stream.link, held_tokens=held)
        assert (await hash_of(client, KEYS.replicas))["r0"] == replace(record, capacity_tokens=wanted).text


async def test_one_agent_at_a_time_holds_a_replica(
    stream: Stream, client: redis.Redis, redis_server: RedisServer
) -> None:
    async with linked(redis_server.url, agent="agent1") as other:
        before = await hash_of(client, KEYS.agents)
        wait_s = await other.attend(VITALS)
        assert isinstance(wait_s, float)
        assert 0 <= wait_s <= agent_store.LEASE_MS / 1000
        assert await hash_of(client, KEYS.agents) == before


def knew(answer: Attended) -> tuple[str, str, int]:
    assert answer.before is not None
    return answer.before.agent, answer.before.incarnation, answer.before.seq


async def test_another_agent_takes_over_when_the_lease_has_lapsed_and_learns_how_far_the_first_had_come(
    stream: Stream, client: redis.Redis, redis_server: RedisServer
) -> None:
    await attend(stream.link, seq=17)
    await stream.say(*gains(chain(1)))
    await stream.link.publish(gains(chain(2)), 0.0, 23)
    await expire_lease(client)
    async with linked(redis_server.url, agent="agent1") as other:
        answer = await attend(other)
        assert knew(answer) == ("agent0", "life1", 23)
        assert isinstance(await stream.link.attend(VITALS), float)


async def test_who_leaves_keeps_for_its_successor_what_it_knew(stream: Stream, redis_server: RedisServer) -> None:
    await attend(stream.link, seq=17)
    await attend(stream.link, leaving=True, seq=99)
    async with linked(redis_server.url, agent="agent1") as other:
        assert knew(await attend(other)) == ("agent0", "life1", 17)


async def test_an_agent_that_holds_nothing_cannot_leave_for_another(
    stream: Stream, client: redis.Redis, redis_server: RedisServer
) -> None:
    await expire_lease(client)
    before = await hash_of(client, KEYS.agents)
    async with linked(redis_server.url, agent="agent1") as other:
        await attend(other, leaving=True)
    assert await hash_of(client, KEYS.agents) == before


@pytest.mark.parametrize("known", [True, False], ids=["another life", "no replica"])
async def test_an_incarnation_that_is_not_the_registrys_is_told_so(
    pool: Pool, client: redis.Redis, redis_server: RedisServer, known: bool
) -> None:
    async with linked(redis_server.url) as link:
        if known:
            await pool.register(replica("r0", "life2"))
        else:
            await client.delete(KEYS.replicas)
        with pytest.raises(Fenced, match="another life"):
            await link.attend(VITALS)
        assert await client.exists(KEYS.agents) == 0


async def test_what_is_asked_is_told_once(stream: Stream, pool: Pool) -> None:
    ask_reset(pool, "r0")
    await drained(pool)
    assert [(await attend(stream.link)).asked for _ in range(2)] == ["reset", ""]


async def test_what_is_asked_waits_for_the_agent_that_holds_the_replica(
    stream: Stream, pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    ask_reset(pool, "r0")
    await followed(client)
    await answered(pool, "a", chain(1), 40)
    async with linked(redis_server.url, agent="agent1") as other:
        assert isinstance(await other.attend(VITALS), float)
    answer = await attend(stream.link)
    assert (answer.asked, len(answer.measured)) == ("reset", 1)


async def answered(pool: Pool, reservation: str, keys: list[str], prompt_tokens: int, on: str = "r0") -> int:
    """Answers a request and reports its prompt's length. Returns whether the claim on its tip was still there."""
    asked = request(reservation, keys, pinned=on)
    placed = await pool.place(asked)
    assert placed is not None
    return int(await tell_measured(pool, asked, placed, prompt_tokens))


async def test_measured_prompts_are_told_once_and_in_order(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    await followed(client)
    await followed(client, "r1")
    await answered(pool, "a", chain(1), 40)
    await answered(pool, "b", chain(2), 3)
    await answered(pool, "c", chain(1), 41, on="r1")
    assert 50 <= await client.ttl(KEYS.measured("r0")) <= 60
    told = [(await attend(stream.link)).measured for _ in range(2)]
    assert told == [[Measured(chain(1)[0], 40), Measured(chain(2)[0], 3)], []]
    assert await client.llen(KEYS.measured("r1")) == 1


async def test_what_is_measured_while_an_agent_is_away_waits_for_it(
    stream: Stream, pool: Pool, client: redis.Redis
) -> None:
    await followed(client)
    await expire_lease(client)
    await pool.beat()
    await answered(pool, "a", chain(1), 40)
    assert (await attend(stream.link)).measured == [Measured(chain(1)[0], 40)]


async def test_where_no_agent_listens_nothing_is_left_for_one(pool: Pool, client: redis.Redis) -> None:
    await register(pool, 1)
    await answered(pool, "a", chain(1), 40)
    assert not await client.exists(KEYS.measured("r0"))


async def forbidden(link: AgentStore, client: redis.Redis) -> None:
    """Publishing is refused and changes nothing."""
    before = await dump(client, "kvgate:*")
    with pytest.raises(Fenced):
        await link.publish(gains(chain(1)), 0.0, 5)
    assert await dump(client, "kvgate:*") == before


async def test_an_agent_of_a_past_life_publishes_nothing(stream: Stream, pool: Pool, client: redis.Redis) -> None:
    await pool.register(replica("r0", "life2"))
    await forbidden(stream.link, client)


async def test_an_agent_that_never_attended_publishes_nothing(client: redis.Redis, redis_server: RedisServer) -> None:
    async with linked(redis_server.url) as link:
        await forbidden(link, client)


async def test_entries_are_numbered_without_gaps_across_agents_and_lives(
    stream: Stream, pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    await stream.say(*gains(chain(*range(250))))  # 100 transitions per entry
    await expire_lease(client)
    async with linked(redis_server.url, agent="agent1") as other:
        await attend(other)
        await forbidden(stream.link, client)
        assert await other.publish(gains(chain(1)), 0.0, 0) == 4
    await pool.register(replica("r0", "life2"))
    await expire_lease(client)
    async with linked(redis_server.url, incarnation="life2") as third:
        await attend(third)
        assert await third.publish(gains(chain(1)), 0.0, 0) == 5
    entries = await client.xrange(KEYS.events("r0"))
    assert [fields["n"] for _, fields in entries] == ["1", "2", "3", "4", "5"]
    assert [fields["inc"] for _, fields in entries] == ["life1"] * 4 + ["life2"]
    assert [len(fields["transitions"].split("\n")) for _, fields in entries] == [100, 100, 50, 1, 1]


async def test_a_stream_is_cut_at_its_cap(stream: Stream, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_store, "STREAM_CAP", 200)
    for _ in range(500):
        await stream.say(*gains(chain(1)))
    entries = await client.xrange(KEYS.events("r0"))
    assert 200 <= len(entries) < 400  # Redis cuts whole nodes of 100
    assert entries[-1][1]["n"] == "500"


async def test_publishing_says_how_far_the_engines_events_were_worked_in(stream: Stream, client: redis.Redis) -> None:
    await attend(stream.link, waiting=2, seq=3)
    before = (await hash_of(client, KEYS.agents))["r0"].split(" ")
    await stream.link.publish(gains(chain(1)), 0.0, 8)
    after = (await hash_of(client, KEYS.agents))["r0"].split(" ")
    assert after == [*before[:-1], "8"]


async def test_a_successor_reads_back_what_holds(stream: Stream, client: redis.Redis) -> None:
    kept = gains(chain(1, 2, 3), medium="cpu")
    await stream.say(*gains(chain("void")))
    await stream.say_all(kept, 0)
    assert sorted(await stream.link.residents(), key=lambda each: each.tokens) == kept


async def test_what_was_sent_on_a_connection_that_was_given_up_is_refused_behind_what_was_said_since(
    stream: Stream, pool: Pool, client: redis.Redis, redis_server: RedisServer
) -> None:
    """A stalled network: the agent reconnects and publishes everything again before its old bytes arrive."""
    await register(pool, 1)
    old = stream.link
    async with linked(redis_server.url) as new:
        await attend(new)
        await say_all(new, [], 7)
        said = await hash_of(client, KEYS.entries), await hash_of(client, KEYS.agents)
        with pytest.raises(StoreDown):
            await old.publish(gains(chain(1)), 0.0, 5)
        assert (await hash_of(client, KEYS.entries), await hash_of(client, KEYS.agents)) == said


async def test_until_all_is_said_a_successor_is_told_the_engine_batch_from_before(stream: Stream) -> None:
    await stream.link.publish(gains(chain(1)), 0.0, 4)
    await stream.link.publish(gains(chain(2)), 0.0, None)
    answer = await attend(stream.link, seq=None)
    assert answer.before is not None
    assert answer.before.seq == 4


async def test_a_successor_goes_on_from_what_is_in_the_map_only(stream: Stream, redis_server: RedisServer) -> None:
    await stream.say(*gains(chain(1, 2)))
    await stream.say(*losses(chain(1, 2)[1:]))
    await attend(stream.link, leaving=True)
    async with linked(redis_server.url, agent="agent1") as successor:
        found = await Handover.find(successor, await attend(successor, seq=None))
        assert found is not None
        assert [resident.key for resident in found.residents] == chain(1)
