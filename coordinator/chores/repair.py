"""Repairs records in a pool's keys that cannot be read, and logs each once. The gateway that does the chores runs it.

`repair` checks records with every heartbeat, a bounded number of them: in a pool of up to 50 replicas or so all that
there are, in a larger pool the next ones. Load is summed again in one step (see lua/repair.lua). A replica's
owned_tokens are the sum of thousands of keys, so they are summed in pieces (lua/recount.lua); a change between two
pieces starts the sum again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import structlog

from coordinator.pool.pool import Pool
from coordinator.registry import PoolState, readable

_log = structlog.get_logger("kvgate.repair")

KEYS = (
    *("replicas", "active", "backlog_tokens", "owned_tokens", "gateways", "breakers", "agents", "engines", "leases"),
    *(
        "asks",
        "reports",
        "entries",
        "cursors",
        "tiers",
        "turn",
        "unreadable",
        "reaped",
        "progress",
        "forgotten",
        "draining",
    ),
    *("rates", "speeds", "waiting", "waiting_tokens", "holds", "paces", "patient", "fair", "tenants", "budgets"),
    *("flight", "own", "held", "events", "measured", "bound"),
)
"""The names under which unreadable records are counted."""
CHECK_FLIGHT_EVERY_MS = 60_000
"""How often everything in flight is checked; the sums are checked in each round."""
AGAIN_MS = 2_000
"""Keys are written into `held` a little later than their owner's record, so a sum may lack some keys. It is compared
with its keys as soon as it has not changed for this time. Otherwise one key that it lacks and one that is new may be
equal by chance."""
_CHECKED_AT_ONCE = 500
"""Records that one call checks: half a ms of Redis' time."""
_CALLS_PER_BEAT = 3
_PIECE = 256
_NAMES = 1000
_OVERLAP = 100
"""Names are read again, because the keys behind a removed one move up."""
_STRICT_PASSES = 8
"""How often a sum is started again because it changed meanwhile; after that it is finished as it is."""
_MAX_TOLD = 1024
_KEY = re.compile(rb"[0-9a-f]{32}")


@dataclass(slots=True, eq=False)
class Recount:
    """Sums one replica's owned_tokens again, and then compares the sum with its keys: a chore, until both are equal."""

    pool: Pool
    replica: str
    is_comparison: bool = False
    is_over: bool = False
    due_ms: int = 0
    passes: int = 0
    """How often the sum, or its comparison, found that something had changed."""
    keys: list[str] = field(default_factory=list)
    names_read: int = 0
    """-1: all are in `keys`."""
    sum_so_far: str = ""
    name: str = field(init=False)
    _summed: int = field(default=0, init=False)
    """How many of the keys."""
    _tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.name = f"owned_tokens {self.replica}"

    async def do_piece(self) -> bool:
        """Read some names of keys, sum some keys, or compare some with the sum."""
        may_wait = self.is_comparison and not self.names_read and self.passes < _STRICT_PASSES
        if may_wait and await self._has_changed():
            return True
        if self.names_read >= 0:
            await self._read_names()
            return False
        return await (self._compare_piece() if self.is_comparison else self._sum_piece())

    async def _has_changed(self) -> bool:
        """Whether the sum is not what it was AGAIN_MS ago. Then the comparison waits again, but not for ever: some
        replicas never stand still."""
        stands = readable(await self.pool.read("HGET", self.pool.keys.owned_tokens, self.replica) or b"")
        if stands != self.sum_so_far:
            self._compare_later(stands, self.passes + 1)
            return True
        return False

    async def _read_names(self) -> None:
        first = max(0, self.names_read - _OVERLAP)
        found = await self.pool.read("ZRANGE", self.pool.keys.held(self.replica), first, first + _NAMES - 1)
        self.keys += [name.decode() for name in found if _KEY.fullmatch(name)]
        self.names_read = first + _NAMES
        if len(found) < _NAMES:
            self.keys, self.names_read = list(dict.fromkeys(self.keys)), -1

    async def _sum_piece(self) -> bool:
        so_far = self.sum_so_far
        if so_far and self.passes >= _STRICT_PASSES:
            so_far = "-"
        piece = self.keys[self._summed : self._summed + _PIECE]
        total = int(await self.pool.run("recount", replica=self.replica, sum_so_far=so_far, keys=piece))
        if total < 0:
            self._start_again(self.passes + 1)
            self.is_over = self.passes > 2 * _STRICT_PASSES  # its own record cannot be read: repair reports it
            return self.is_over
        self._summed += len(piece)
        self.sum_so_far = str(total)
        if self._summed < len(self.keys):
            return False
        self._compare_later(str(total), 0)
        return True

    async def _compare_piece(self) -> bool:
        piece = self.keys[self._summed : self._summed + _PIECE]
        told = await self.pool.run("recount", replica=self.replica, sum_so_far="?", keys=piece)
        if not isinstance(told, list):
            self.is_over = True  # its own record cannot be read: repair reports it
            return True
        tokens, stands = int(told[0]), readable(told[1] or b"")
        if self.passes >= _STRICT_PASSES and not self._summed:
            self.sum_so_far = stands  # read together with the first keys, which may be all
        if stands != self.sum_so_far:
            self.is_over = self.passes >= 2 * _STRICT_PASSES  # as right as can be: it changes all the time
            self._compare_later(stands, self.passes + 1)
            return True
        self._summed, self._tokens = self._summed + len(piece), self._tokens + tokens
        if self._summed < len(self.keys):
            return False
        self.is_over = stands == str(self._tokens)
        if not self.is_over:
            self._start_again(0)
            self.is_comparison = False
        return self.is_over

    def _compare_later(self, stands: str, passes: int) -> None:
        self._start_again(passes)
        self.is_comparison, self.sum_so_far = True, stands
        self.due_ms = (self.pool.state.now_ms if self.pool.state is not None else 0) + AGAIN_MS

    def _start_again(self, passes: int) -> None:
        self.passes, self.sum_so_far = passes, ""
        self.keys, self.names_read, self._summed, self._tokens = [], 0, 0, 0


class Repair:
    """Repairs one pool. Its methods raise StoreError."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._recounts: dict[str, Recount] = {}
        self._told: set[tuple[str, str]] = set()
        self._flight_checked_ms = 0
        self._part, self._offset = 1, 0

    async def repair(self) -> None:
        """Check the next records, and repair what one step can repair. Each part of the records comes once at most."""
        for _ in range(_CALLS_PER_BEAT):
            if await self._repair_piece():
                return

    async def repair_all(self) -> None:
        """Check all records."""
        self._part, self._offset = 1, 0
        while not await self._repair_piece():
            pass

    async def _repair_piece(self) -> bool:
        """One call. Returns whether all records were checked once more."""
        state = self._pool.state
        now_ms = state.now_ms if state is not None else 0
        check_flight = now_ms >= self._flight_checked_ms + CHECK_FLIGHT_EVERY_MS
        place = {"part": self._part, "offset": self._offset, "at_most": _CHECKED_AT_ONCE, "check_flight": check_flight}
        self._part, self._offset = 1, 0  # if the call is refused
        found, replicas, part, offset = await self._pool.run("repair", **place, has_known=False, known=())
        if part < 0:
            known = [(one.replica, one.text) for one in state.replicas.values()] if state is not None else []
            found, replicas, part, offset = await self._pool.run("repair", **place, has_known=True, known=known)
        for at in range(0, len(found), 3):
            self._tell(readable(found[at]), readable(found[at + 1]), int(found[at + 2]))
        for replica in map(readable, replicas):
            if replica not in self._recounts or self._recounts[replica].is_comparison:
                self._recounts[replica] = Recount(self._pool, replica)
        self._part, self._offset = part or 1, offset
        if part == 0 and check_flight and now_ms:
            self._flight_checked_ms = now_ms
        return bool(part == 0)

    def due_recounts(self, state: PoolState) -> list[Recount]:
        """The sums of owned_tokens that are to be made again, or compared with their keys, now."""
        self._recounts = {
            name: one for name, one in self._recounts.items() if not one.is_over and name in state.replicas
        }
        return [one for one in self._recounts.values() if state.now_ms >= one.due_ms]

    def _tell(self, key: str, name: str, times: int) -> None:
        self._pool.unreadable[key] += times
        if (key, name) not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add((key, name))
            _log.warning("could not be read", pool=self._pool.name, key=key, field=name[:64], times=times)
