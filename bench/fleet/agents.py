"""The agents of light replicas: the real agent's session, whose events come from the engine in the same process.

Everything after an event's arrival is the product's own code (coordinator/agent): residency, chains read from Redis,
batches of transitions, heartbeats. ZeroMQ, replays and HTTP are left out. An agent that loses its lease starts anew
without the events before.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence

from coordinator.agent.agent_store import AgentStore, Fenced, Registration
from coordinator.agent.batch_sequence import Item, Lost, Received
from coordinator.agent.engine_session import BEAT_S, EngineSession, EventIntake, SessionOver
from coordinator.agent.http_engine import EngineSnapshot
from coordinator.agent.kv_events import Batch, Event
from coordinator.engine.facts import parse_metrics
from coordinator.keys import pool_slug
from gateway.simulator.prompt import token_text

_EVENTS = "inproc://light"
"""Only tells the agent that the engine publishes events."""
_VERSION = (0, 32)


class _DirectIntake(EventIntake):
    """Events that are put into it. It is never full."""

    def __init__(self, replica: str) -> None:
        super().__init__(replica, _EVENTS, "")
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, item: Item) -> None:
        self._items.put_nowait(item)

    async def listen(self) -> None:
        await asyncio.Event().wait()


class _DirectSession(EngineSession):
    def __init__(
        self,
        registration: Registration,
        replica: str,
        snapshot: EngineSnapshot,
        engine: LightProbe,
        intake: _DirectIntake,
        follows: asyncio.Event,
        turns: asyncio.Semaphore,
    ) -> None:
        super().__init__(registration, replica, snapshot, engine)
        self._intake = intake
        self._follows = follows
        self._turns = turns

    async def _reach(self) -> AgentStore | None:
        if self.store is not None:
            return await super()._reach()
        async with self._turns:
            return await super()._reach()

    async def _take_over(self) -> None:
        await super()._take_over()
        self._follows.set()


class LightProbe:
    """What an agent asks of its engine (coordinator/agent/http_engine.EngineProbe)."""

    def __init__(self, url: str, model: str, exposition: Callable[[], str]) -> None:
        self._url = url
        self._pool = pool_slug(model)
        self._exposition = exposition

    async def look(self) -> EngineSnapshot:
        facts = parse_metrics(self._exposition(), None)
        return EngineSnapshot(
            pool=self._pool,
            url=self._url,
            started=facts.started,
            capacity_tokens=facts.capacity_tokens,
            block_size=facts.block_size,
            version=_VERSION,
            events=_EVENTS,
            waiting=int(facts.figures.get("waiting", 0)),
            counters=facts.figures,
        )

    async def detokenize(self, tokens: Sequence[int]) -> str | None:
        return token_text(list(tokens))


class LightAgent:
    """The agent of one replica. Run `run` as a task, again after a failure; only cancellation ends it."""

    def __init__(self, redis_url: str, replica: str, probe: LightProbe, turns: asyncio.Semaphore) -> None:
        """`turns` limits how many agents of this process connect to Redis at the same time. If one process connected a
        thousand times at once, each connection would exceed its time limit."""
        self._registration = Registration(redis_url, replica, f"{replica}.{secrets.token_hex(3)}")
        self._replica = replica
        self._probe = probe
        self._turns = turns
        self._numbers = itertools.count()
        self._intake = _DirectIntake(replica)
        self.follows = asyncio.Event()
        """Set as soon as it follows its engine."""

    def publish(self, events: list[Event]) -> None:
        """The engine's cache has changed."""
        self._intake.put(Received(next(self._numbers), Batch(time.time(), events)))

    async def run(self) -> None:
        while True:
            try:
                await self._follow()
            except SessionOver:
                pass
            except Fenced:
                await asyncio.sleep(BEAT_S)
            finally:
                self._intake = _DirectIntake(self._replica)
                last = next(self._numbers)
                self._intake.put(Lost(0, last + 1))

    async def _follow(self) -> None:
        session = _DirectSession(
            self._registration,
            self._replica,
            await self._probe.look(),
            self._probe,
            self._intake,
            self.follows,
            self._turns,
        )
        await session.run()
