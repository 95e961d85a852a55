"""Reaps dead gateways, beside the heartbeat, in pieces of bounded size.

If a gateway's heartbeat names a dead gateway, it gives the dead gateway's load back at once (lua/reap.lua). Handling
the claims of the dead gateway's requests takes longer: their reservations wait in `reaped` for the gateway that does
the pool's chores. Each is removed when its claims are handled. So if the gateway that does the chores dies in the
middle, the next one continues. Handling claims twice changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import structlog

from coordinator.errors import StoreError, StoreRefused
from coordinator.pool.placed_chains import read_chains
from coordinator.pool.pool import Pool
from coordinator.registry import PoolState

_log = structlog.get_logger("kvgate.reaper")

_GIVEN_BACK_AT_ONCE = 256
_HANDLED_AT_ONCE = 16
_KEYS_AT_ONCE = 256
"""Two or three ms of Redis' time, for which placements on the same connection wait."""


class _Reaped(NamedTuple):
    reservation: str
    replica: str
    tip: str
    gateway: str


class Reaper:
    """Reaps in one pool, in a task of its own."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._task: asyncio.Task[None] | None = None

    def go_on(self, state: PoolState) -> None:
        """Start to reap what a heartbeat named, unless reaping is under way."""
        is_mine = state.reaped > 0 and state.worker == self._pool.gateway
        if (state.expired_gateways or is_mine) and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(state))

    def close(self) -> None:
        """The connection is gone: the next gateway that beats continues."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, state: PoolState) -> None:
        try:
            await self.reap(state)
        except StoreError as error:
            _log.info("reaping broke off", pool=self._pool.name, reason=str(error))
        except Exception as error:  # nobody awaits it
            _log.error("reaping failed", pool=self._pool.name, error=type(error).__name__)

    async def reap(self, state: PoolState) -> None:
        """Give back what the gateways that a heartbeat named had reserved. The gateway that does the pool's chores also
        handles the claims of all reservations given back. Raises StoreError."""
        k = self._pool.keys
        for gateway in state.expired_gateways:
            while await self._pool.run("reap", gateway=gateway, at_most=_GIVEN_BACK_AT_ONCE):
                pass
        if state.worker == self._pool.gateway:
            waiting = await self._pool.read("HKEYS", k.reaped)
            for start in range(0, len(waiting), _HANDLED_AT_ONCE):
                await self._handle_claims(waiting[start : start + _HANDLED_AT_ONCE])

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
        unconfirmed: list[tuple[_Reaped, list[str]]] = []
        for one, bound in zip(lost, chains, strict=True):
            chain = bound.decode().split(" ")[5:] if bound is not None else []
            if pool.state is not None and pool.state.is_followed(one.replica):
                unconfirmed += ((one, chain[i : i + _KEYS_AT_ONCE]) for i in range(0, len(chain), _KEYS_AT_ONCE))
            elif chain:
                pool.hold_at_once(one.replica, chain)
        await self._take_back(unconfirmed)
        await pool.read("HDEL", k.reaped, *reservations)

    async def _take_back(self, claimed: Sequence[tuple[_Reaped, Sequence[str]]]) -> None:
        """Withdraw these keys' claims, _KEYS_AT_ONCE at a time."""
        sent: list[asyncio.Future[Any]] = []
        keys = 0
        for one, chain in claimed:
            sent.append(self._pool.take_back(one.replica, one.reservation, chain))
            keys += len(chain)
            if keys >= _KEYS_AT_ONCE:
                await _all_done(sent)
                sent, keys = [], 0
        await _all_done(sent)


def _parse(reservation: bytes, entry: bytes | None) -> _Reaped | None:
    """None if it was handled meanwhile, or cannot be read."""
    fields = entry.decode(errors="replace").split(" ") if entry is not None else []
    if len(fields) != 6:
        return None
    replica, _incarnation, _since_ms, _backlog_tokens, tip, gateway = fields
    return _Reaped(reservation.decode(errors="replace"), replica, tip, gateway)


async def _all_done(withdrawals: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for them. Raises StoreError, but not if Redis refused one: it would refuse it again."""
    for outcome in await asyncio.gather(*withdrawals, return_exceptions=True):
        if isinstance(outcome, StoreRefused):
            _log.warning("claims of a dead gateway were not withdrawn", reason=str(outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
