"""Several appliers on one Redis: every entry reaches the map once and in order, whatever happens to the appliers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import redis.asyncio as redis

from coordinator.agent.agent_store import AgentStore
from coordinator.chores import applier as applier_module
from coordinator.chores.applier import Applied, Applier
from coordinator.pool.pool import Pool
from coordinator.redis.wire import Wire
from tests.coordinator.stage import KEYS, chain, dump, hash_of, now_ms, numbers, owners
from tests.coordinator.stream import attend, gains, linked, losses
from tests.polling import eventually
from tests.redis_server import EACH_REDIS, RedisServer, running_redis, server_named

REPLICAS = ("r0", "r1", "r2")
SENT = 30
"""The number of entries that each agent publishes at a time."""


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier_module, "LEASE_MS", 400)
    monkeypatch.setattr(applier_module, "_LEAD_S", 0.05)
    monkeypatch.setattr(applier_module, "_RETRY_S", 0.05)
    monkeypatch.setattr(applier_module, "_BLOCK_MS", 20)
    monkeypatch.setattr(applier_module, "_ENTRIES", 4)


@pytest.fixture(params=EACH_REDIS)
def own_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server that a test may empty."""
    with running_redis(server_named(request.param)) as server:
        yield server


@asynccontextmanager
async def agents(url: str, first_agent: int = 0) -> AsyncIterator[list[AgentStore]]:
    """One agent for each replica."""
    async with AsyncExitStack() as stack:
        links = []
        for i, name in enumerate(REPLICAS, start=first_agent):
            link = await stack.enter_async_context(linked(url, name, f"agent{i}"))
            await attend(link)
            links.append(link)
        yield links


class Crew:
    """Running appliers, and the entries that they reported as applied, in the order of the reports."""

    def __init__(self, url: str, tasks: asyncio.TaskGroup) -> None:
        self._url = url
        self._tasks = tasks
        self._running: dict[str, asyncio.Task[None]] = {}
        self.applied: list[Applied] = []

    def join(self, who: str) -> Applier:
        applier = Applier(self._url, who, "m", self.applied.append)
        self._running[who] = self._tasks.create_task(applier.run())
        return applier

    async def end(self, who: str) -> None:
        self._running[who].cancel()
        await asyncio.gather(self._running.pop(who), return_exceptions=True)

    async def end_all(self) -> None:
        for who in list(self._running):
            await self.end(who)

    def sizes(self, replica: str) -> list[int]:
        """The number of transitions in each entry applied for a replica, in order."""
        return [one.transitions for one in self.applied if one.replica == replica]


@asynccontextmanager
async def crew_on(url: str, *gateways: str) -> AsyncIterator[Crew]:
    async with asyncio.TaskGroup() as tasks:
        crew = Crew(url, tasks)
        for who in gateways:
            crew.join(who)
        try:
            yield crew
        finally:
            await crew.end_all()


async def say(links: Sequence[AgentStore], first: int = 1, count: int = SENT) -> None:
    """Publishes entries. Entry i makes i keys resident. From entry 2 on, one more transition evicts a key that is not
    resident."""
    for i in range(first, first + count):
        for link in links:
            before = losses(chain("entry", i - 1)[:1]) if i > 1 else []
            await link.publish([*before, *gains(chain("entry", i, *range(i - 1))[1:])], 0.0, i)


async def is_applied(links: Sequence[AgentStore], entries: int) -> bool:
    return all([await link.is_applied(entries) for link in links])


async def caught_up(links: Sequence[AgentStore], entries: int) -> None:
    await eventually(lambda: is_applied(links, entries))


def sizes_said(first: int = 1, count: int = SENT) -> list[int]:
    return [i + (i > 1) for i in range(first, first + count)]


async def assert_map(client: redis.Redis, entries: int = SENT) -> None:
    """The map matches these entries, each applied once."""
    total = 100 * sum(range(1, entries + 1))
    expected = dict.fromkeys(REPLICAS, total)
    assert await numbers(client, KEYS.owned_tokens) == expected
    for i in (1, entries):
        for key in chain("entry", i, *range(i - 1))[1:]:
            assert sorted(await owners(client, key)) == sorted(REPLICAS)


async def lapse(client: redis.Redis, who: str) -> None:
    """Lets all leases of an applier end now."""
    past = await now_ms(client) - 1
    for field, value in (await hash_of(client, KEYS.leases)).items():
        if field == f"applier:{who}":
            await client.hset(KEYS.leases, field, past)
        elif value.startswith(f"{who} "):
            await client.hset(KEYS.leases, field, f"{who} {past}")


async def test_two_appliers_apply_every_entry_of_three_replicas_once_and_in_order(
    client: redis.Redis, redis_server: RedisServer
) -> None:
    async with agents(redis_server.url) as links, crew_on(redis_server.url, "gw0", "gw1") as crew:
        await say(links)
        await caught_up(links, SENT)
        await eventually(lambda: len(crew.applied) == 3 * SENT)
        assert [crew.sizes(name) for name in REPLICAS] == [sizes_said()] * 3
        await assert_map(client)


async def test_the_work_is_shared(client: redis.Redis, redis_server: RedisServer) -> None:
    async with agents(redis_server.url), crew_on(redis_server.url) as crew:
        crowd = [crew.join(f"gw{i}") for i in range(3)]
        await eventually(lambda: sorted(one.held for one in crowd) == [[name] for name in REPLICAS])


async def test_what_one_that_was_killed_left_undone_another_does(
    client: redis.Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_wire: Wire) -> None:
        """A killed applier gives nothing back."""

    async with agents(redis_server.url) as links, crew_on(redis_server.url) as crew:
        victim = crew.join("gw0")
        monkeypatch.setattr(victim, "_give_back", nothing)
        await say(links, count=10)
        await eventually(lambda: len(crew.applied) >= 5)
        await crew.end("gw0")
        before = len(crew.applied)
        survivor = crew.join("gw1")
        await say(links, first=11, count=SENT - 10)
        await caught_up(links, SENT)
        assert len(survivor.held) == 3
        await eventually(lambda: crew.sizes("r0")[-1] == sizes_said()[-1])
        assert len(crew.applied) > before
        await assert_map(client)
        for name in REPLICAS:
            seen = crew.sizes(name)
            assert seen == sorted(set(seen))  # in order, without duplicates


async def test_one_that_was_paused_past_its_lease_applies_nothing_of_what_it_had_read(
    client: redis.Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()
    async with agents(redis_server.url) as links, crew_on(redis_server.url) as crew:
        paused = crew.join("gw0")
        apply = paused._apply

        async def pausing(*entries: Any) -> None:
            reached.set()
            await gate.wait()
            await apply(*entries)

        monkeypatch.setattr(paused, "_apply", pausing)
        await say(links, count=10)
        await reached.wait()
        await lapse(client, "gw0")
        crew.join("gw1")
        await caught_up(links, 10)
        await eventually(lambda: len(crew.applied) == 30)
        before = await dump(client, "*:own:*", "*:owned_tokens", "*:held:*", "*:cursors")
        gate.set()
        await eventually(lambda: len(paused.held) >= 1)  # it holds streams again
        assert await dump(client, "*:own:*", "*:owned_tokens", "*:held:*", "*:cursors") == before
        await say(links, first=11, count=SENT - 10)
        await caught_up(links, SENT)
        await eventually(lambda: len(crew.applied) == 3 * SENT)
        assert [crew.sizes(name) for name in REPLICAS] == [sizes_said()] * 3
        await assert_map(client)


async def test_who_is_cancelled_gives_its_streams_back_at_once(client: redis.Redis, redis_server: RedisServer) -> None:
    async with agents(redis_server.url), crew_on(redis_server.url) as crew:
        one = crew.join("gw0")
        await eventually(lambda: len(one.held) == 3)
        await crew.end("gw0")
        leases = await hash_of(client, KEYS.leases)
        assert sorted(leases) == ["events:r0", "events:r1", "events:r2"]
        assert all(lease.startswith("- ") for lease in leases.values())


@pytest.mark.parametrize("how", ["restarted", "flushed"])
async def test_when_redis_has_lost_everything_the_streams_begin_anew(own_server: RedisServer, how: str) -> None:
    async with (
        crew_on(own_server.url, "gw0", "gw1") as crew,
        redis.Redis.from_url(own_server.url, decode_responses=True, protocol=2) as client,
    ):
        async with agents(own_server.url) as links:
            await say(links, count=5)
            await caught_up(links, 5)
        if how == "restarted":
            own_server.restart_empty()
        else:
            await client.flushall()
        crew.applied.clear()
        async with agents(own_server.url, first_agent=3) as links:
            await say(links)
            await caught_up(links, SENT)
            await eventually(lambda: len(crew.applied) == 3 * SENT)
            assert [crew.sizes(name) for name in REPLICAS] == [sizes_said()] * 3
            assert not any(one.entries_missing for one in crew.applied)
            await assert_map(client)


async def test_the_lag_from_the_engines_event_to_the_map_is_told(
    client: redis.Redis, redis_server: RedisServer
) -> None:
    async with agents(redis_server.url) as links, crew_on(redis_server.url, "gw0") as crew:
        await links[0].publish(gains(chain(1)), 5.0, 0)
        await eventually(lambda: bool(crew.applied))
        [one] = crew.applied
        assert (one.pool, one.replica, one.transitions, one.entries_missing) == ("m", "r0", 1, False)
        assert one.lag_ms >= 5_000


async def test_entries_that_the_cap_cut_off_are_told_and_asked_for_again(
    client: redis.Redis, redis_server: RedisServer
) -> None:
    async with agents(redis_server.url) as links:
        await say(links[:1], count=3)
        await client.xtrim(KEYS.events("r0"), maxlen=1, approximate=False)
        async with crew_on(redis_server.url, "gw0") as crew:
            await eventually(lambda: bool(crew.applied))
            assert [one.entries_missing for one in crew.applied] == [True]
        assert [(await attend(link)).asked for link in links] == ["restate", "", ""]


async def test_an_entry_that_no_agent_wrote_is_taken_out_and_what_follows_is_applied(
    own_server: RedisServer,
) -> None:
    async with agents(own_server.url) as links, redis.from_url(own_server.url) as client:
        await client.xadd(KEYS.events("r0"), {"n": "one"})
        await links[0].publish(gains(chain(1, 2)), 0.0, 1)
        task = asyncio.ensure_future(Applier(own_server.url, "gw0", "m", lambda _applied: None).run())
        try:
            await eventually(lambda: links[0].is_applied(1))
            assert await client.xlen(KEYS.events("r0")) == 1
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_round_that_outlasts_the_leases_does_not_lose_them(
    client: redis.Redis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Applier._apply

    async def slow(self: Applier, wire: Wire, streams: Any) -> None:
        await asyncio.sleep(0.8)  # for three replicas this takes longer than a lease
        await apply(self, wire, streams)

    # Long enough that a machine that stalls for a second, as in this suite, ends none.
    monkeypatch.setattr(applier_module, "LEASE_MS", 2000)
    monkeypatch.setattr(Applier, "_apply", slow)
    monkeypatch.setattr(applier_module, "_TRANSITIONS_AT_ONCE", 1)
    async with agents(redis_server.url) as links, crew_on(redis_server.url, "gw0"):
        await say(links, count=8)
        await caught_up(links, 8)
        assert await hash_of(client, KEYS.asks) == {}
    await assert_map(client, 8)


async def test_a_stream_that_is_lost_in_the_middle_of_a_write_holds_up_no_other(
    client: redis.Redis, redis_server: RedisServer, pool: Pool
) -> None:
    applied: list[Applied] = []
    applier = Applier(redis_server.url, "gw0", "m", applied.append)
    wire = pool._wire
    assert wire is not None
    applier._allow_oom = pool._allow_oom
    async with agents(redis_server.url) as links:
        await say(links, count=3)
        await applier._lead(wire)
        streams = await applier._read(wire)
        assert sorted(name for name, _ in streams) == list(REPLICAS)
        await client.hset(KEYS.leases, "events:r1", f"gw1 {await now_ms(client) + 60_000}")
        await applier._apply(wire, streams)
        assert [one.replica for one in applied] == ["r0"] * 3 + ["r2"] * 3
        assert applier.held == ["r0", "r2"]
        await client.hset(KEYS.leases, "events:r1", f"gw0 {await now_ms(client) + 60_000}")
        await pool.beat()  # no stream is free
        await applier._lead(wire)
        assert applier.held == list(REPLICAS), "it may hold more than it knew"
