"""The agent of one replica: finds its engine, follows it through its lives, and lets go when asked to stop."""

from __future__ import annotations

import asyncio
import secrets
import time

import structlog

from coordinator.agent.engine_session import BEAT_S, EngineSession, SessionOver
from coordinator.agent.http_engine import EngineAway, EngineProbe, EngineSnapshot
from coordinator.agent.link import LEASE_MS, Fenced
from coordinator.agent.registration import Registration

_log = structlog.get_logger("kvgate.agent")

_LEASE_S = LEASE_MS / 1000


class Agent:
    """`run()` as a task; it ends only by cancellation."""

    def __init__(self, redis_url: str, replica: str, engine: EngineProbe, namespace: str = "") -> None:
        self.id = f"{replica}.{secrets.token_hex(3)}"
        self._replica = replica
        self._engine = engine
        self._registration = Registration(redis_url, replica, self.id, namespace)
        self.life: EngineSession | None = None

    async def run(self) -> None:
        """Follow the engine, from life to life."""
        refused = ""  # why, while it is tried again and again: said once
        while True:
            sight = await self._find()
            self.life = EngineSession(self._registration, self._replica, sight, self._engine)
            if not refused:
                self._announce(sight)
            began_s = time.monotonic()
            try:
                await self.life.run()
            except SessionOver:
                _log.info("engine lives another life", replica=self._replica)
                refused = ""
            except Fenced as reason:
                if str(reason) != refused or time.monotonic() > began_s + _LEASE_S:
                    refused = str(reason)
                    _log.warning("let go", replica=self._replica, reason=refused)
                await asyncio.sleep(BEAT_S)

    def _announce(self, sight: EngineSnapshot) -> None:
        _log.info(
            "following",
            replica=self._replica,
            started=sight.started or "unknown",
            events=sight.events or "none",
            replay=sight.replay or "none",
        )
        if not sight.events:
            _log.warning(
                "it publishes no KV events: the replica stays degraded; give vLLM --kv-events-config, or name the "
                "endpoint of this rank with --events",
                replica=self._replica,
            )

    async def _find(self) -> EngineSnapshot:
        said = ""
        while True:
            try:
                return await self._engine.look()
            except EngineAway as error:
                if str(error) != said:
                    said = str(error)
                    _log.info("waiting for the engine", replica=self._replica, problem=said)
            await asyncio.sleep(BEAT_S)
