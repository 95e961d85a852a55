"""Finds records in a pool's keys that cannot be read, and logs each once. The worker runs it.

`repair` checks records with every heartbeat, a bounded number of them: in a pool of up to 50 replicas or so all that
there are, in a larger pool the next ones. What depends on them becomes right again: see lua/repair.lua.
"""

from __future__ import annotations

import structlog

from coordinator.pool.pool import Pool
from coordinator.registry import readable

_log = structlog.get_logger("kvgate.repair")

KINDS = (
    *("replicas", "active", "backlog_tokens", "owned_tokens", "gateways", "breakers", "agents", "engines", "leases"),
    *("asks", "reports", "entries", "cursors", "tiers", "turn", "unreadable", "reaped", "progress", "forgotten"),
    *("draining", "rates", "speeds", "waiting", "waiting_tokens", "holds", "paces", "patient", "fair", "tenants"),
    *("budgets", "flight", "own", "held", "events", "measured", "bound"),
)
"""The names under which unreadable records are counted."""
FULL_EVERY_MS = 60_000
"""How often everything in flight is checked and counted again; the sums are checked in each round."""
VOIDED_EVERY_MS = 60_000
"""A replica's residency is voided at most so often: its agent then says everything again."""
_CHECKED_AT_ONCE = 500
"""Records that one call checks: half a ms of Redis' time."""
_CALLS_PER_BEAT = 3
_MAX_TOLD = 1024


class Repair:
    """Repairs one pool. Its methods raise StoreError."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._told: set[tuple[str, str]] = set()
        self._full_ms = 0
        self._is_full = False
        self._part, self._offset = 1, 0

    async def repair(self) -> None:
        """Check the next records. Each part of the records comes once at most."""
        for _ in range(_CALLS_PER_BEAT):
            if await self._check_piece():
                return

    async def repair_all(self) -> None:
        """Check all records."""
        self._part, self._offset = 1, 0
        while not await self._check_piece():
            pass

    async def _check_piece(self) -> bool:
        """One call. Returns whether all records were checked once more."""
        now_ms = self._pool.state.now_ms if self._pool.state is not None else 0
        if self._part == 1:
            self._is_full = now_ms >= self._full_ms + FULL_EVERY_MS
        place = {"part": self._part, "offset": self._offset, "at_most": _CHECKED_AT_ONCE}
        self._part, self._offset = 1, 0  # if the call is refused
        call = self._pool.run("repair", **place, is_full=self._is_full, rest_ms=VOIDED_EVERY_MS)
        found, part, offset = await call
        for at in range(0, len(found), 3):
            self._tell(readable(found[at]), readable(found[at + 1]), int(found[at + 2]))
        self._part, self._offset = part or 1, offset
        if part == 0 and self._is_full and now_ms:
            self._full_ms = now_ms
        return bool(part == 0)

    def _tell(self, kind: str, name: str, times: int) -> None:
        self._pool.unreadable[kind] += times
        if (kind, name) not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add((kind, name))
            _log.warning("could not be read", pool=self._pool.name, key=kind, field=name[:64], times=times)
