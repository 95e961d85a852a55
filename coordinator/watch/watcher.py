"""Watches the Redis that coordination and LMCache's chunks share. Every gateway and coordinator runs one; whoever holds
the lease watches.

It never scans. It hears of every chunk that is written, where Redis publishes that, and meets others by RANDOMKEY:
`samples_per_s` a second, some 5 us of Redis' time each. A chunk that it knows is looked at a dozen times in its life
(rota.py), by a script that gives a TTL to what has none and a new life to what is read (lua/tend.lua).
Everything is on connections of its own: what happens here delays no placement.
"""

from __future__ import annotations

import asyncio

import structlog

from coordinator.errors import StoreError, StoreRefused
from coordinator.keys import WATCHER
from coordinator.redis.address import connect
from coordinator.redis.time_limit import answered
from coordinator.redis.wire import Wire
from coordinator.scripts import load
from coordinator.store_connection import load_scripts
from coordinator.watch.watch_session import ANSWER_S, TICK_S, Report, WatchSession, WatchSettings

_log = structlog.get_logger("kvgate.watch")

LEASE_MS = 3000
_LEASE_EVERY_S = 1.0
_CONNECT_S = 1.0
_RETRY_S = 1.0
_FULL = "OOM"


class Watcher:
    """`run()` as a task. `who` names it in the lease."""

    def __init__(self, url: str, who: str, settings: WatchSettings) -> None:
        self._url = url
        self._who = who
        self._settings = settings
        self._tenure: WatchSession | None = None
        self._allow_oom = True
        self._said = ""

    @property
    def report(self) -> Report | None:
        """What was found last; None where another one watches, or Redis is away."""
        return self._tenure.report if self._tenure is not None else None

    async def run(self) -> None:
        """Watch whenever nobody else does, until cancelled; then give the lease back."""
        while True:
            try:
                wire = await connect(self._url, WATCHER, _CONNECT_S, lambda _error: None)
            except StoreError as error:
                self._say(str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                await self._serve(wire)
            except StoreError as error:
                self._say(str(error))
            except Exception as error:  # a watch that ended would not be missed by anyone
                _log.error("watching failed", error=type(error).__name__, detail=str(error))
            finally:
                await self._end(wire)
            await asyncio.sleep(_RETRY_S)

    async def _serve(self, wire: Wire) -> None:
        self._allow_oom = await answered(load_scripts(wire), ANSWER_S)
        loop = asyncio.get_running_loop()
        while True:
            if not await self._holds_lease(wire):
                await self._end_tenure()
                await asyncio.sleep(_LEASE_EVERY_S)
                continue
            if self._tenure is None:
                self._tenure = WatchSession(wire, self._allow_oom, self._url, self._settings)
                _log.info("watching the store", who=self._who)
            lease_due_s = loop.time() + _LEASE_EVERY_S
            while loop.time() < lease_due_s:
                await self._tenure.tick()
                await asyncio.sleep(TICK_S)

    async def _holds_lease(self, wire: Wire, leaving: bool = False) -> bool:
        script = load("watch", self._allow_oom)
        try:
            operands = script.operands(watcher=WATCHER, watcher_name=self._who, lease_ms=LEASE_MS, leaving=leaving)
            return bool(await answered(wire.run(script, operands), ANSWER_S))
        except StoreRefused as error:
            # Before 7, a full Redis takes no lease from anybody. Then everyone watches: that is when it is needed most.
            if _FULL in str(error):
                return not leaving
            raise

    async def _end(self, wire: Wire) -> None:
        """Give the lease back, where Redis still answers, and let go of everything."""
        try:
            if self._tenure is not None:
                await self._holds_lease(wire, leaving=True)
        except StoreError:
            pass
        finally:
            await self._end_tenure()
            await wire.close()

    async def _end_tenure(self) -> None:
        tenure, self._tenure = self._tenure, None
        if tenure is not None:
            await tenure.close()

    def _say(self, reason: str) -> None:
        """Once for each reason."""
        if reason != self._said:
            self._said = reason
            _log.info("not watching", reason=reason)
