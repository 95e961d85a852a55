"""An agent follows one engine process, over real sockets and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import redis.asyncio as redis

from coordinator.agent import engine_session
from coordinator.agent.agent_store import Registration
from coordinator.agent.batch_sequence import Restarted
from coordinator.agent.engine_session import EngineSession, EventIntake, publish_at_s
from coordinator.agent.http_engine import EngineSnapshot
from coordinator.keys import PoolKeys
from coordinator.registry import AgentRecord
from tests.coordinator.agent.publisher import Publisher
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

KEYS = PoolKeys("m")


class QuietEngine:
    """An engine that never restarts and has no text for tokens."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def look(self) -> EngineSnapshot:
        return EngineSnapshot(
            pool="m",
            url="http://r0.test:8000",
            started="18bcfe56800",
            capacity_tokens=1600,
            block_size=16,
            version=(0, 32),
            events=self._publisher.events_endpoint,
            replay=self._publisher.replay_endpoint,
        )

    async def detokenize(self, tokens: Sequence[int]) -> str | None:
        return None


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[redis.Redis]:
    async with redis.Redis.from_url(server.url, decode_responses=True, protocol=2) as client:
        yield client


async def mode_of(store: redis.Redis) -> str:
    record = await store.hget(KEYS.agents, "r0")
    return AgentRecord.parse(record).mode if record else ""


async def is_mode(store: redis.Redis, mode: str) -> bool:
    return await mode_of(store) == mode


async def floors(store: redis.Redis) -> int:
    """The number of times that everything was published again."""
    entries = await store.xrange(KEYS.events("r0"))
    return sum(fields["transitions"] == "reset" for _, fields in entries)


async def has_restated(store: redis.Redis, times: int) -> bool:
    return await floors(store) >= times


async def test_an_engine_that_is_heard_again_has_everything_said_again(
    engine: Publisher, server: RedisServer, store: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the agent heard nothing, its replica was not exact, and the replica's keys were trimmed."""
    monkeypatch.setattr(engine_session, "_SILENCE_S", 1.5)
    seen = QuietEngine(engine)
    session = asyncio.ensure_future(
        EngineSession(Registration(server.url, "r0", "agent0"), "r0", await seen.look(), seen).run()
    )
    try:
        await eventually(lambda: is_mode(store, "session"))
        await eventually(lambda: has_restated(store, 1))
        before = await floors(store)
        engine.is_mute = True
        await eventually(lambda: is_mode(store, "none"))
        assert await floors(store) == before
        engine.is_mute = False
        await eventually(lambda: is_mode(store, "session"))
        await eventually(lambda: has_restated(store, before + 1))
    finally:
        session.cancel()
        await asyncio.gather(session, return_exceptions=True)


@pytest.mark.parametrize(("agents", "apart_s"), [(0, 0.02), (80, 0.02), (400, 0.1), (1000, 0.25), (100_000, 0.25)])
def test_the_larger_the_fleet_the_less_often_an_agent_publishes(agents: int, apart_s: float) -> None:
    assert publish_at_s(100.0, 100.0, agents) == pytest.approx(100 + apart_s)
    assert publish_at_s(100.0, 99.0, agents) == pytest.approx(100.02), "at once after a pause"


async def test_an_agent_learns_from_its_heartbeat_how_large_the_fleet_is(
    engine: Publisher, server: RedisServer, store: redis.Redis
) -> None:
    others = {f"other{i}": "agent life1 1 session 0 0 -1" for i in range(399)}
    await store.hset(KEYS.agents, mapping=others)
    seen = QuietEngine(engine)
    follows = EngineSession(Registration(server.url, "r0", "agent0"), "r0", await seen.look(), seen)
    session = asyncio.ensure_future(follows.run())
    try:
        await eventually(lambda: follows._intake.agents == 400)
    finally:
        session.cancel()
        await asyncio.gather(session, return_exceptions=True)


async def test_what_happens_while_an_agent_gathers_is_published_together(monkeypatch: pytest.MonkeyPatch) -> None:
    intake, slept_s, sleep = EventIntake("r0", "tcp://events", ""), list[float](), asyncio.sleep
    intake.agents = 1000

    async def meanwhile(delay_s: float) -> None:
        slept_s.append(delay_s)
        await intake._items.put(Restarted())
        await sleep(0)

    async def collected(within_s: float) -> int:
        await intake._items.put(Restarted())
        return len(await intake.collect(asyncio.get_running_loop().time() + within_s))

    monkeypatch.setattr(asyncio, "sleep", meanwhile)
    assert [await collected(3600), await collected(3600), await collected(0.1)] == [2, 2, 2]
    assert slept_s[0] == pytest.approx(0.02)
    assert 0.02 < slept_s[1] <= 0.25
    assert slept_s[2] <= 0.1, "a heartbeat does not wait for it"
