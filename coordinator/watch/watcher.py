"""Watches the Redis that coordination and LMCache's chunks share. Every gateway and coordinator runs a watcher; the
holder of the lease does the work.

It never scans. Redis' events, if they are on, tell it of every chunk that is written. It finds others by RANDOMKEY:
100 a second, some 5 us of Redis' time each. It looks at each known chunk a dozen times in the chunk's life
(chunk_schedule.py), with a script that gives a TTL to a chunk without one and a new life to a chunk that is read
(lua/tend.lua). It uses connections of its own, so no placement waits for its answers.
"""

from __future__ import annotations

import asyncio

import structlog

from coordinator.errors import StoreError, StoreRefused
from coordinator.keys import WATCHER
from coordinator.redis.address import connect
from coordinator.redis.time_limit import answered
from coordinator.redis.wire import Wire, load_scripts
from coordinator.watch.store_report import noted
from coordinator.watch.watch_session import ANSWER_S, TICK_S, Report, WatchSession

_log = structlog.get_logger("kvgate.watch")

LEASE_MS = 3000
_LEASE_EVERY_S = 1.0
_CONNECT_S = 1.0
_RETRY_S = 1.0
_FULL = "OOM"


class Watcher:
    """Run `run()` as a task. `who` is this process' name in the lease."""

    def __init__(self, url: str, who: str, chunk_ttl_s: int) -> None:
        self._url = url
        self._who = who
        self._chunk_ttl_s = chunk_ttl_s
        self._session: WatchSession | None = None
        self._logged_reason = ""

    @property
    def report(self) -> Report | None:
        """The last report; None if another process watches, or if Redis is away."""
        return self._session.report if self._session is not None else None

    async def run(self) -> None:
        """Watch whenever nobody else does. On cancellation, give the lease back."""
        while True:
            try:
                wire = await connect(self._url, WATCHER, _CONNECT_S, lambda _error: None)
            except StoreError as error:
                self._log_once(str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                await self._serve(wire)
            except StoreError as error:
                self._log_once(str(error))
            except Exception as error:  # nobody would notice a watch that ended
                _log.error("watching failed", error=type(error).__name__, detail=str(error))
            finally:
                await self._end(wire)
            await asyncio.sleep(_RETRY_S)

    async def _serve(self, wire: Wire) -> None:
        await answered(load_scripts(wire), ANSWER_S)
        loop = asyncio.get_running_loop()
        while True:
            if not await self._holds_lease(wire):
                await self._end_session()
                await asyncio.sleep(_LEASE_EVERY_S)
                continue
            if self._session is None:
                self._session = WatchSession(wire, self._url, self._chunk_ttl_s)
                _log.info("watching the store", who=self._who)
            lease_due_s = loop.time() + _LEASE_EVERY_S
            while loop.time() < lease_due_s:
                await self._session.tick()
                await asyncio.sleep(TICK_S)

    async def _holds_lease(self, wire: Wire, leaving: bool = False) -> bool:
        try:
            report = noted(self.report) if self.report is not None else b""
            lease = {"watcher_name": self._who, "lease_ms": LEASE_MS, "report": report, "leaving": leaving}
            return bool(await answered(wire.ask_script("watch", watcher=WATCHER, **lease), ANSWER_S))
        except StoreRefused as error:
            # Before version 7, a full Redis gives nobody the lease. Then everybody watches: it is needed most then.
            if _FULL in str(error):
                return not leaving
            raise

    async def _end(self, wire: Wire) -> None:
        """Give the lease back if Redis still answers, and close everything."""
        try:
            if self._session is not None:
                await self._holds_lease(wire, leaving=True)
        except StoreError:
            pass
        finally:
            await self._end_session()
            await wire.close()

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _log_once(self, reason: str) -> None:
        """Log each reason once."""
        if reason != self._logged_reason:
            self._logged_reason = reason
            _log.info("not watching", reason=reason)
