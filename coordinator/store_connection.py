"""One connection to the store as a gateway sees it: up or down, and what that means for the pools that use it.

    down   --connect, PING within the budget, missing scripts loaded, everything reasserted--> up
    up     --connection lost, a reply overdue, or N placements in a row refused--> down
    up     --N placements in a row late, because of Redis--> paused
    paused --after a time, PING within the budget--> up, until the first placement is late again
    paused --connection lost, or a reply overdue--> down

While it is down, every call fails at once, so a placement falls back without waiting, and the connection keeps trying.
While it is paused, only placements fail at once. Heartbeats, settlements and adoptions go on. So a gateway does not
reconnect to a store that is overloaded: connecting costs Redis more than placements do. Each pause is longer than the
one before, until a placement is in time. A single late placement falls back for that request only.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from coordinator.errors import StoreDown, StoreError, StoreLate, StoreRefused
from coordinator.maintenance.worker import Worker
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import BEAT_S, Pool
from coordinator.redis.address import connect, is_cluster
from coordinator.redis.checks import settings_warnings
from coordinator.redis.info import OLDEST, read_info
from coordinator.redis.outage import Outage
from coordinator.redis.time_limit import LoopLag, answered
from coordinator.redis.wire import Wire, has_result, load_scripts

_log = structlog.get_logger("kvgate.store")

RETRY_S = 0.25
PAUSE_S, MAX_PAUSE_S = 0.05, 0.5
"""Of placements: each pause is twice as long as the one before, until a placement is in time."""
_JITTER = 0.5
"""Gateways that lost the store together do not return in one moment."""
CONNECT_S = 1.0
BREAKER_MISSES = 5
"""Late placements in a row after which placements pause: one or two are a hiccup, and each costs a request its time."""
OVERDUE_S, OVERDUE_BUDGETS = 1.0, 2.0
"""If a reply is missing for so long, or for so many budgets if that is longer, its connection is closed: it hangs."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to reach the store and how long to wait for it."""

    url: str
    budget_s: float
    namespace: str = ""
    knobs: tuple[PolicyKnobs, ...] = ()
    """The settings of placements that most requests use."""


class StoreConnection:
    """Owns one connection, to the server that has `key`. Pools that are added are attached to it while it is up. Run
    `run()` as a task while it is used."""

    def __init__(self, settings: StoreOptions, key: str, on_change: Callable[[bool, str], None], lag: LoopLag) -> None:
        self.reason = "not connected yet"
        """Why it is down or paused; empty while it is up."""
        self.warnings: list[str] = []
        self._settings, self._lag = settings, lag
        self._key = key
        self._on_change = on_change
        self._pools: dict[str, Pool] = {}
        self._wire: Wire | None = None
        self._misses = 0
        self._missed_at = 0.0
        self._is_paused = False
        self._pauses = 0
        """Since a placement was in time."""
        self._outage = Outage()
        self._broken = asyncio.Event()
        self._first_attempt = asyncio.Event()

    def __repr__(self) -> str:
        return f"<StoreConnection {'up' if self.is_up() else 'down: ' + self.reason}, pools {sorted(self._pools)}>"

    def is_up(self) -> bool:
        """Whether placements go through it now."""
        return self._wire is not None and not self._is_paused

    def is_connected(self) -> bool:
        """Whether heartbeats and other calls go through it now; placements may be paused."""
        return self._wire is not None

    def add(self, pool: Pool) -> None:
        """One more pool uses this connection."""
        self._pools[pool.name] = pool
        if self._wire is not None:
            pool.attach(self._wire, self._is_in_cluster)
            pool.link.is_paused = self._is_paused

    async def ask(self, *command: Any) -> Any:
        """A plain command that belongs to no pool. Raises StoreError."""
        if self._wire is None:
            raise StoreDown("the store is not connected")
        return await self._wire.send(*command)

    async def ask_script(self, script: str, **operands: Any) -> Any:
        """Run a script whose keys belong to no pool. Raises StoreError."""
        if self._wire is None:
            raise StoreDown("the store is not connected")
        return await self._wire.ask_script(script, **operands)

    async def first_attempt(self) -> None:
        """Wait until the first attempt to connect has ended, with or without success."""
        await self._first_attempt.wait()

    def note(self, error: StoreError | None) -> None:
        """Count a placement's outcome. After too many failures in a row, placements are paused if the last one was
        late, and the connection is given up if it was refused.

        Placements that are late together count once: a hiccup is one miss, however many were in flight.
        """
        if error is None:
            self._misses = 0
            if self._pauses and not self._is_paused:
                self._pauses = 0
                self._say_up()
            return
        now = asyncio.get_running_loop().time()
        is_own = isinstance(error, StoreLate) and error.cause == "gateway"
        is_failure = isinstance(error, StoreLate | StoreRefused) and not is_own and self.is_up()
        if not is_failure or now - self._missed_at < self._settings.budget_s:
            return
        self._missed_at = now
        self._misses += 1
        is_over = self._misses >= BREAKER_MISSES
        reason = f"{self._misses} placements in a row failed; the last: {error}"
        if is_over and isinstance(error, StoreRefused):
            self._give_up(reason)
        elif isinstance(error, StoreLate) and (is_over or self._pauses):
            self._pause(reason)
            self._on_change(False, reason)

    # -- pauses ------------------------------------------------------------------------------------------------

    def _pause(self, reason: str) -> None:
        """Let placements fail at once for a time."""
        assert self._wire is not None
        self._say_away("placements paused", reason)
        self.reason = reason
        self._set_paused(True)
        pause_s = _jittered(min(PAUSE_S * 2**self._pauses, MAX_PAUSE_S))
        self._pauses += 1
        asyncio.get_running_loop().call_later(pause_s, self._probe, self._wire)

    def _probe(self, wire: Wire) -> None:
        """A PING waits in Redis behind the same calls as a placement, and costs Redis next to nothing."""
        if wire is self._wire:
            reply = wire.send("PING", budget_s=self._lag.extended(self._settings.budget_s))
            reply.add_done_callback(partial(self._probed, wire))

    def _probed(self, wire: Wire, reply: asyncio.Future[Any]) -> None:
        if wire is not self._wire:
            return
        if not has_result(reply):
            self._pause(self.reason)
            return
        self._set_paused(False)
        self.reason = ""
        self._on_change(True, "")

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused, self._misses = is_paused, 0
        for pool in self._pools.values():
            pool.link.is_paused = is_paused

    # -- the connection ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the store connected, beating for every pool, until cancelled."""
        while True:
            try:
                wire = await self._connect()
            except StoreError as error:
                self._down(str(error))
                self._first_attempt.set()
                await asyncio.sleep(_jittered(RETRY_S))
                continue
            up_at = asyncio.get_running_loop().time()
            try:
                self._up(wire)
                self._first_attempt.set()
                await self._beat_until_broken(wire)
            finally:
                self.reason = self.reason or "closing"
                self._broken.set()  # the calls that closing it fails are no news
                self._detach()
                await wire.close(self.reason)
            # At once if it had served for a while; one that breaks at its first call is not reopened in a tight loop.
            await asyncio.sleep(max(0.0, up_at + _jittered(RETRY_S) - asyncio.get_running_loop().time()))

    async def _connect(self) -> Wire:
        self._broken.clear()
        wire = await connect(self._settings.url, self._key, CONNECT_S, lambda error: self._give_up(str(error)))
        try:
            await answered(self._prepare(wire), CONNECT_S)
        except BaseException:
            await wire.close("gave up connecting")
            raise
        return wire

    async def _prepare(self, wire: Wire) -> None:
        """Check whether the server can be used, and load the scripts. Raises StoreError if not."""
        # First, so that a server that is too slow is asked for nothing more. It is judged like a placement, which
        # allows for a busy event loop; otherwise a busy gateway would never be up again.
        await wire.send("PING", budget_s=self._lag.extended(self._settings.budget_s))
        await load_scripts(wire, self._settings.knobs)
        self.warnings, self._is_in_cluster = await _inspect(wire, self._settings.url)

    async def _beat_until_broken(self, wire: Wire) -> None:
        """Every 0.5 s: the heartbeat and maintenance of each pool, and a check for overdue replies."""
        workers: dict[str, Worker] = {}
        beats: set[asyncio.Task[Any]] = set()
        try:
            while not self._broken.is_set():
                if wire.oldest_age_s() > max(OVERDUE_S, OVERDUE_BUDGETS * self._settings.budget_s):
                    self._give_up("a reply is overdue")
                    return
                if not beats:
                    for name, pool in self._pools.items():
                        worker = workers.setdefault(name, Worker(pool))
                        task = asyncio.get_running_loop().create_task(worker.tick())
                        beats.add(task)
                        task.add_done_callback(beats.discard)
                try:
                    async with asyncio.timeout(BEAT_S):
                        await self._broken.wait()
                except TimeoutError:
                    pass
        finally:
            for task in beats:
                task.cancel()
            for worker in workers.values():
                worker.close()

    def _up(self, wire: Wire) -> None:
        self._wire, self._misses, self._pauses, self._is_paused = wire, 0, 0, False
        for pool in self._pools.values():
            pool.attach(wire, self._is_in_cluster)
        self.reason = ""
        for warning in self.warnings:
            _log.warning("redis setting", problem=warning)
        self._say_up()
        self._on_change(True, "")

    def _give_up(self, reason: str) -> None:
        if not self._broken.is_set():
            self._broken.set()
            self._down(reason)

    def _down(self, reason: str) -> None:
        was_up = self.is_up()
        self._say_away("store down", reason)
        self.reason = reason or "not connected"
        self._detach()
        if was_up:
            self._on_change(False, self.reason)

    def _say_away(self, event: str, reason: str) -> None:
        away_s = self._outage.failed(asyncio.get_running_loop().time())
        if away_s is not None:
            _log.warning(event, reason=reason, pools=sorted(self._pools), away_s=away_s)

    def _say_up(self) -> None:
        away_s = self._outage.ended(asyncio.get_running_loop().time())
        _log.info("store up", pools=sorted(self._pools), **({} if away_s is None else {"away_s": away_s}))

    def _detach(self) -> None:
        self._wire = None
        for pool in self._pools.values():
            pool.detach()

    async def leave(self) -> None:
        """Deregister from every pool: what is still reserved in this gateway's name is given back at once."""
        for pool in self._pools.values():
            pool.reservations.forget_all()
            if self._wire is None:
                continue
            try:
                await answered(pool.leave(), CONNECT_S)
            except StoreError as error:
                _log.warning("could not deregister", pool=pool.name, error=str(error))
            pool.detach()  # another heartbeat would register this gateway again


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(1, 1 + _JITTER)


async def _inspect(wire: Wire, url: str) -> tuple[list[str], bool]:
    """What an operator should know about this Redis (nothing if an ACL hides it), and whether it is a Redis Cluster."""
    try:
        info = read_info(await wire.send("INFO"))
    except StoreRefused:
        return [], is_cluster(url)
    if info.mode == "sentinel":
        raise StoreRefused("it is a sentinel; write redis+sentinel://host:26379/NAME for the master that it calls NAME")
    if info.role == "slave":
        raise StoreRefused("it is a replica, which cannot be written to; name its master, or sentinels that know it")
    if info.version < OLDEST:
        raise StoreRefused(f"Redis {info.version_text} is too old: 6.2 is the oldest supported")
    warnings = settings_warnings(info)
    if info.mode == "cluster" and not is_cluster(url):
        warnings.append("this is one node of a Redis Cluster: write redis+cluster:// for pools that are on others, too")
    return warnings, info.mode == "cluster"
