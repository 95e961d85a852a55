"""Reaps dead gateways, beside the heartbeat, in pieces of bounded size.

If a gateway's heartbeat names a dead gateway, it gives the dead gateway's load back at once (lua/reap.lua). Handling
the claims of the dead gateway's requests takes longer: their reservations wait in `reaped` for the gateway that does
the pool's maintenance, which rests between them. Each is removed when its claims are handled. So if that gateway dies
in the middle, the next one continues. Handling claims twice changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import structlog

from coordinator.errors import StoreError, StoreRefused
from coordinator.maintenance.task_queue import rest_s
from coordinator.pool.lost_gateways import forget_lost, note_lost
from coordinator.pool.placed_chains import read_chains
from coordinator.pool.pool import BEAT_S, LEASE_MS, Pool
from coordinator.registry import PoolState

_log = structlog.get_logger("kvgate.reaper")

_GIVEN_BACK_AT_ONCE = 128
"""A ms or two. There is no rest between the calls, because load has to be free within seconds."""
_SILENT_MS = int(LEASE_MS - 2 * BEAT_S * 1000)
"""A gateway whose lease has run out has died between two heartbeats; one of them may have been late."""
_HANDLED_AT_ONCE = 16
_KEYS_AT_ONCE = 256
"""One or two ms of Redis' time, for which placements on the same connection wait."""


class _Reaped(NamedTuple):
    reservation: str
    replica: str
    tip: str
    gateway: str


class Reaper:
    """Reaps in one pool, in two tasks of its own: load has to be free within seconds, and claims may take longer."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._named: frozenset[str] = frozenset()
        """The dead gateways that the last heartbeat named."""
        self._is_new = True
        """Whether the store did not know this gateway at the last heartbeat."""

    def go_on(self, state: PoolState) -> None:
        """Start to reap what a heartbeat named, unless that is under way. The gateway that does the maintenance reaps
        at once. The others reap what is still named half a second later, because that gateway may be dead, too."""
        if self._is_new and state.known:
            self._start("own", lambda: forget_lost(self._pool))
        self._is_new = not state.known
        is_worker, before = state.worker == self._pool.gateway, self._named
        self._named = frozenset(state.expired_gateways)
        if self._named if is_worker else self._named & before:
            self._start("load", lambda: self.give_back(state.expired_gateways))
        if is_worker and state.reaped > 0:
            self._start("claims", self.handle_claims)

    def close(self) -> None:
        """The connection is gone: the next gateway that beats continues."""
        for task in self._tasks.values():
            task.cancel()

    def _start(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if what not in self._tasks or self._tasks[what].done():
            self._tasks[what] = asyncio.get_running_loop().create_task(self._run(work))

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except StoreError as error:
            _log.info("reaping broke off", pool=self._pool.name, reason=str(error))
        except Exception as error:  # nobody awaits it
            _log.error("reaping failed", pool=self._pool.name, error=type(error).__name__)

    async def give_back(self, gateways: Sequence[str]) -> None:
        """Give back what these gateways had reserved, unless they live again. Raises StoreError."""
        for gateway in gateways:
            is_left = True
            while is_left:
                asked = {"gateway": gateway, "at_most": _GIVEN_BACK_AT_ONCE, "silent_ms": _SILENT_MS}
                is_left = bool(await self._pool.run("reap", **asked))
                self._pool.settlements.room()  # each grants some of those that wait
            await note_lost(self._pool, gateway)

    async def handle_claims(self) -> None:
        """Handle the claims of all reservations that were given back. Raises StoreError."""
        loop = asyncio.get_running_loop()
        waiting = await self._pool.read("HKEYS", self._pool.keys.reaped)
        for start in range(0, len(waiting), _HANDLED_AT_ONCE):
            begun_s = loop.time()
            await self._handle_claims(waiting[start : start + _HANDLED_AT_ONCE])
            await asyncio.sleep(rest_s(begun_s))

    async def _handle_claims(self, reservations: Sequence[bytes]) -> None:
        """Handle the claims of these requests. If a replica's events tell what it computed, claims that are not
        confirmed by now are withdrawn. Otherwise they are claims like others, and are held. A request that is in flight
        again, because its gateway came back, is left alone."""
        pool, k = self._pool, self._pool.keys
        entries = await pool.read("HMGET", k.reaped, *reservations)
        reaped = [one for one in map(_parse, reservations, entries) if one is not None]
        in_flight = await asyncio.gather(*(pool.read("HGET", k.flight(one.gateway), one.reservation) for one in reaped))
        lost = [one for one, entry in zip(reaped, in_flight, strict=True) if entry is None]
        chains = await read_chains(pool.read, k, [one.tip for one in lost]) if lost else []
        for one, bound in zip(lost, chains, strict=True):
            chain = bound.decode().split(" ")[5:] if bound is not None else []
            if pool.state is not None and pool.state.is_told(one.replica):
                await self._take_back(one, chain)
            elif chain:
                pool.claims.hold_at_once(one.replica, chain)
        await pool.read("HDEL", k.reaped, *reservations)

    async def _take_back(self, one: _Reaped, chain: Sequence[str]) -> None:
        """Withdraw the claims of a request. What Redis refuses, it would refuse again. Raises other StoreErrors."""
        for start in range(0, len(chain), _KEYS_AT_ONCE):
            try:
                await self._pool.claims.take_back(one.replica, one.reservation, chain[start : start + _KEYS_AT_ONCE])
            except StoreRefused as error:
                _log.warning("claims of a dead gateway were not withdrawn", reason=str(error))


def _parse(reservation: bytes, entry: bytes | None) -> _Reaped | None:
    """None if it was handled meanwhile, or cannot be read."""
    fields = entry.decode(errors="replace").split(" ") if entry is not None else []
    if len(fields) != 6:
        return None
    replica, _incarnation, _since_ms, _backlog_tokens, tip, gateway = fields
    return _Reaped(reservation.decode(errors="replace"), replica, tip, gateway)
