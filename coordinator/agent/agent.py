"""The agent of one replica: finds its engine, follows it from one process to the next, and stops when cancelled."""

from __future__ import annotations

import asyncio
import secrets
import time

import structlog

from coordinator.agent.agent_store import LEASE_MS, AgentStore, Fenced, Registration
from coordinator.agent.engine_session import BEAT_S, EngineSession, SessionOver
from coordinator.agent.http_engine import EngineAway, EngineProbe, EngineSnapshot
from coordinator.errors import StoreDown

_log = structlog.get_logger("kvgate.agent")

_LEASE_S = LEASE_MS / 1000


class Agent:
    """Run `run()` as a task; only cancellation ends it."""

    def __init__(self, redis_url: str, replica: str, engine: EngineProbe, namespace: str = "") -> None:
        self.id = f"{replica}.{secrets.token_hex(3)}"
        self._replica = replica
        self._engine = engine
        self._registration = Registration(redis_url, replica, self.id, namespace)
        self._session: EngineSession | None = None

    async def run(self) -> None:
        """Follow the engine, one session after the other."""
        refused = ""  # a reason that comes again and again is logged once
        while True:
            snapshot = await self._find()
            session = self._session = EngineSession(self._registration, self._replica, snapshot, self._engine)
            if not refused:
                self._announce(snapshot)
            began_s = time.monotonic()
            try:
                await session.run()
            except SessionOver:
                _log.info("another engine process runs now", replica=self._replica)
                refused = ""
            except Fenced as reason:
                if str(reason) != refused or time.monotonic() > began_s + _LEASE_S:
                    refused = str(reason)
                    _log.warning("let go", replica=self._replica, reason=refused)
                await asyncio.sleep(BEAT_S)

    async def drain(self) -> None:
        """Drain the replica, and wait until it has no request in flight. Raises StoreError if Redis cannot be reached,
        or if no engine is followed."""
        await self._store().drain()
        while True:
            if not await self._store().active_requests():
                break
            await asyncio.sleep(BEAT_S)
        _log.info("drained", replica=self._replica)

    def _store(self) -> AgentStore:
        if self._session is None or self._session.store is None:
            raise StoreDown("this agent follows no engine now, or Redis is away")
        return self._session.store

    def _announce(self, snapshot: EngineSnapshot) -> None:
        _log.info(
            "following",
            replica=self._replica,
            started=snapshot.started or "unknown",
            events=snapshot.events or "none",
            replay=snapshot.replay or "none",
        )
        if not snapshot.events:
            _log.warning(
                "it publishes no KV events: the replica stays degraded; give vLLM --kv-events-config, or name the "
                "endpoint of this rank with --events",
                replica=self._replica,
            )

    async def _find(self) -> EngineSnapshot:
        problem = ""
        while True:
            try:
                return await self._engine.look()
            except EngineAway as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.info("waiting for the engine", replica=self._replica, problem=problem)
            await asyncio.sleep(BEAT_S)
