"""Repairs records in a pool's keys that cannot be read, and logs each once. The gateway that does the chores runs it.

`repair` checks every key that a pool has once, with every heartbeat. This is cheap while all can be read; if not, it
sums load again in one step (see lua/repair.lua). A replica's owned_tokens are the sum of thousands of keys, so they are
summed in pieces (lua/recount.lua); a change between two pieces starts the sum again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from coordinator.pool.pool import Pool
from coordinator.registry import PoolState, readable

_log = structlog.get_logger("kvgate.repair")

KEYS = (
    *("replicas", "active", "backlog_tokens", "owned_tokens", "gateways", "breakers", "agents", "engines", "leases"),
    *("asks", "reports", "entries", "cursors", "tiers", "turn", "unreadable", "reaped", "progress"),
    *("flight", "own", "held", "events", "measured", "bound"),
)
"""The names under which unreadable records are counted."""
CHECK_FLIGHT_EVERY_MS = 60_000
"""How often everything in flight is checked; the sums are checked each time."""
AGAIN_MS = 2_000
"""Keys are written into `held` a little later than their owner's record, so a sum may lack some keys. After this time
the sum is compared with its keys, and computed again until both were equal once."""
_PIECE = 512
_STRICT_PASSES = 8
"""How often a sum is started again because it changed meanwhile; after that it is finished as it is."""
_MAX_TOLD = 1024
_KEY = re.compile(rb"[0-9a-f]{32}")


@dataclass(slots=True)
class _Recount:
    """The sum of one replica's owned_tokens so far; it continues after a round that was cut off."""

    is_comparison: bool = False
    due_ms: int = 0
    passes: int = 0
    keys: list[str] = field(default_factory=list)
    sum_so_far: str = ""


class Repair:
    """Repairs one pool. Its methods raise StoreError."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._recounts: dict[str, _Recount] = {}
        self._told: set[tuple[str, str]] = set()
        self._flight_checked_ms = 0

    async def repair(self) -> None:
        """Repair what one step can repair, and note whose owned_tokens must be summed."""
        state = self._pool.state
        known = state.replicas.values() if state is not None else ()
        check_flight = state is not None and state.now_ms >= self._flight_checked_ms + CHECK_FLIGHT_EVERY_MS
        if state is not None and check_flight:
            self._flight_checked_ms = state.now_ms
        records = [(record.replica, record.text) for record in known]
        found, replicas = await self._pool.run("repair", check_flight=check_flight, known=records)
        for at in range(0, len(found), 3):
            self._tell(readable(found[at]), readable(found[at + 1]), int(found[at + 2]))
        for replica in map(readable, replicas):
            if replica not in self._recounts or self._recounts[replica].is_comparison:
                self._recounts[replica] = _Recount()

    async def recount(self, state: PoolState) -> None:
        """Sum owned_tokens again for the replicas for which it is due."""
        for replica, recount in list(self._recounts.items()):
            if replica not in state.replicas:
                del self._recounts[replica]
            elif state.now_ms >= recount.due_ms:
                if not recount.is_comparison:
                    await self._sum(replica, recount)
                    self._recounts[replica] = _Recount(is_comparison=True, due_ms=state.now_ms + AGAIN_MS)
                elif await self._is_right(replica):
                    del self._recounts[replica]
                else:
                    self._recounts[replica] = _Recount()

    async def _sum(self, replica: str, recount: _Recount) -> None:
        k = self._pool.keys
        while True:
            if not recount.sum_so_far:
                recount.keys = prefix_keys(self._pool, replica, await self._pool.read("ZRANGE", k.held(replica), 0, -1))
            piece = recount.keys[:_PIECE]
            so_far = recount.sum_so_far
            if so_far and recount.passes >= _STRICT_PASSES:
                so_far = "-"
            total = int(await self._pool.run("recount", replica=replica, sum_so_far=so_far, keys=piece))
            if total < 0:
                recount.passes, recount.sum_so_far = recount.passes + 1, ""
                if recount.passes > 2 * _STRICT_PASSES:
                    return  # its own record cannot be read: the next repair reports it
                continue
            del recount.keys[:_PIECE]
            recount.sum_so_far = str(total)
            if not recount.keys:
                return

    async def _is_right(self, replica: str) -> bool:
        """Whether the sum is that of the replica's keys; also true if it changes all the time."""
        k = self._pool.keys
        for _ in range(_STRICT_PASSES):
            keys = prefix_keys(self._pool, replica, await self._pool.read("ZRANGE", k.held(replica), 0, -1))
            total, stood = 0, set()
            for start in range(0, max(1, len(keys)), _PIECE):
                piece = keys[start : start + _PIECE]
                told = await self._pool.run("recount", replica=replica, sum_so_far="?", keys=piece)
                if not isinstance(told, list):
                    return True  # its own record cannot be read: the next repair reports it
                total += int(told[0])
                stood.add(told[1])
            if len(stood) == 1:
                return stood == {str(total).encode()}
        return True

    def _tell(self, key: str, name: str, times: int) -> None:
        self._pool.unreadable[key] += times
        if (key, name) not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add((key, name))
            _log.warning("could not be read", pool=self._pool.name, key=key, field=name[:64], times=times)


def prefix_keys(pool: Pool, replica: str, members: Sequence[bytes]) -> list[str]:
    """The members of `held` that are prefix keys; others are removed and counted."""
    others = [member for member in members if not _KEY.fullmatch(member)]
    if others:
        pool.unreadable["held"] += len(others)
        _log.warning("could not be read", pool=pool.name, key="held", field=replica, times=len(others))
        pool.read("ZREM", pool.keys.held(replica), *others)
    return [member.decode() for member in members if _KEY.fullmatch(member)]
