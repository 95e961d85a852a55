"""Keeps the keys that replicas are believed to hold within bounds, and true.

A replica's cache is bounded, so the keys that it owns are as well. If no agent tells what it holds, keys are trimmed,
least recently used first: those of an older incarnation, those that no request has used for CLAIM_TTL_MS, and those for
which its cache has no room (the engine's own capacity, from /metrics, or MAX_KEYS if that is unknown). If an agent
does, keys of an older incarnation are trimmed, and records that are not valid any more are swept: all keys when the
floor has moved or another incarnation has begun, and each WHOLE_PASS_MS; else each SWEEP_EVERY_MS those used since the
last pass. A replica that is drained, and has no request in flight any more, loses all keys.

Whether any of this is due follows from a few figures of each replica (`due`), not from a look at its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.pool.pool import Pool
from coordinator.registry import ASLEEP, PoolState, ReplicaRecord, is_number

CLAIM_TTL_MS = 3_600_000
UNCONFIRMED_MS = 4_000
"""Suppose an agent knows everything that a replica holds. Then a claim of this age whose request is over is wrong: an
event would have confirmed it, or the gateway that made it would have withdrawn it."""
UNCONFIRMED_RELEARNING_MS = 600_000
"""The same while the agent still relearns: then an older claim may be true without an event."""
AGENT_RETURNS_MS = 30_000
"""For this time after its agent has gone, a replica's keys are not trimmed."""
SWEEP_EVERY_MS = 60_000
WHOLE_PASS_MS = 3_600_000
"""A pass over the keys used lately misses claims of a request that ran for longer than that, if its gateway died."""
MAX_KEYS = 200_000
_EVER_MS = 10**15
"""Later than any use: all keys go."""
_PIECE = 128


@dataclass(frozen=True, slots=True)
class Look:
    """What decides about one replica's tasks."""

    count: int
    oldest_ms: float
    """The last use of the key that was used least recently; 0 if there is no key."""
    newest_ms: float
    owned_tokens: int
    active: int = 0
    """Requests in flight."""


@dataclass(slots=True)
class Pass:
    """The last complete sweep over a replica's keys, or the one that is under way."""

    life: tuple[str, int]
    """Incarnation and floor: if one changes, all keys are checked."""
    is_known: bool
    """Whether the agent knew everything that the replica holds."""
    claims_before_ms: int
    """Claims last used before it were judged."""
    began_ms: int
    whole_ms: int
    """When the last pass over all keys began."""


@dataclass(slots=True, eq=False)
class HeldKeys:
    """What is due on one replica's keys: a task. `left` and `down_to_ms` are those of sweep.lua."""

    pool: Pool
    replica: str
    trims: bool = False
    before_ms: int = 0
    to_capacity: bool = False
    left: int = 0
    down_to_ms: int = 0
    claims_before_ms: int = 0
    is_urgent: bool = False
    """Whether placements suffer, or owned_tokens are wrong, until it is done."""
    when_done: Callable[[], None] = lambda: None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"held {self.replica}"

    async def do_piece(self) -> bool:
        if self.trims:
            self.trims = await trim_piece(self.pool, self.replica, self.before_ms, self.to_capacity) > 0
        elif self.left:
            self.left, _ = await sweep_piece(self.pool, self.replica, self.left, self.claims_before_ms, self.down_to_ms)
        if not self.is_due:
            self.when_done()
        return not self.is_due

    @property
    def is_due(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.trims or self.left)


def is_known(replica: str, state: PoolState) -> bool:
    """Whether an agent tells everything that the replica holds, so that keys it has not named are not there."""
    return state.is_told(replica) and not state.agents[replica].is_relearning


def _awaits_agent(replica: str, state: PoolState) -> bool:
    """Whether its agent has gone only lately, or may not have come back yet since the clock jumped: the next agent
    starts from what the map says."""
    until_ms = state.followed_until_ms(replica)
    return 0 <= until_ms < state.now_ms <= until_ms + AGENT_RETURNS_MS + state.uncounted_ms(until_ms)


def due(
    pool: Pool, record: ReplicaRecord, look: Look, state: PoolState, last: Pass | None
) -> tuple[HeldKeys, Pass | None]:
    """What is due on a replica's keys, and the pass that is the last one when it is done."""
    replica, task = record.replica, HeldKeys(pool, record.replica, before_ms=record.since_ms)
    sweep: Pass | None = None
    if state.is_told(replica) or _awaits_agent(replica, state):
        sweep, task.down_to_ms = _pass(record, state, last)
        if sweep is not last and look.newest_ms >= task.down_to_ms:
            task.left, task.claims_before_ms = look.count, sweep.claims_before_ms
            task.is_urgent = last is not None and (sweep.life != last.life or sweep.is_known != last.is_known)
    else:
        task.before_ms, task.to_capacity = stale_before_ms(record, state), True
        limit = record.capacity_tokens
        task.trims = look.owned_tokens > limit if limit else look.count > MAX_KEYS
    if record.state == ASLEEP or (record.state == "draining" and not look.active):
        task.before_ms = _EVER_MS
    task.trims = look.count > 0 and (task.trims or look.oldest_ms < task.before_ms)
    task.is_urgent = task.is_urgent or task.trims
    return task, sweep


def _pass(record: ReplicaRecord, state: PoolState, last: Pass | None) -> tuple[Pass, int]:
    """The pass that is due, and down to which last use it goes (0: all keys); `last` itself if none is."""
    now_ms, life, knows = state.now_ms, (record.incarnation, record.floor), is_known(record.replica, state)
    claims_before_ms = 0
    if state.is_told(record.replica):
        claims_before_ms = now_ms - (UNCONFIRMED_MS if knows else UNCONFIRMED_RELEARNING_MS)
    has_gone_back = last is not None and last.began_ms > now_ms
    if last is None or last.life != life or has_gone_back or now_ms > last.whole_ms + WHOLE_PASS_MS:
        return Pass(life, knows, claims_before_ms, now_ms, now_ms), 0
    if claims_before_ms and (now_ms > last.began_ms + SWEEP_EVERY_MS or (knows and not last.is_known)):
        return Pass(life, knows, claims_before_ms, now_ms, last.whole_ms), last.claims_before_ms
    return last, 0


def stale_before_ms(record: ReplicaRecord, state: PoolState) -> int:
    """Keys of a replica without an agent that were last used before this time are not believed any more."""
    unused_before_ms = state.now_ms - CLAIM_TTL_MS
    return max(record.since_ms, unused_before_ms - state.uncounted_ms(unused_before_ms))


async def look_at(pool: Pool, replicas: Sequence[str]) -> list[Look]:
    """What decides about the tasks of these replicas. Raises StoreError."""
    told = await pool.run("look", replicas=replicas)
    return [
        Look(int(count), float(oldest or 0), float(newest or 0), int(owned) if is_number(owned) else 0, int(active))
        for count, oldest, newest, owned, active in zip(*(told[at::5] for at in range(5)), strict=True)
    ]


async def trim_piece(pool: Pool, replica: str, before_ms: int, to_capacity: bool) -> int:
    """Drop the least recently used keys: those last used before `before_ms`, and those for which there is no room;
    returns how many."""
    limits = {"before_ms": before_ms, "to_capacity": to_capacity, "max_keys": MAX_KEYS, "at_most": _PIECE}
    return int(await pool.run("trim", replica=replica, only_drained=before_ms == _EVER_MS, **limits))


async def sweep_piece(pool: Pool, replica: str, left: int, claims_before_ms: int, down_to_ms: int) -> tuple[int, int]:
    """Remove keys whose records are not valid any more; returns how many keys are left to look at, and how many
    went."""
    limits = {"claims_before_ms": claims_before_ms, "down_to_ms": down_to_ms}
    still_left, removed = await pool.run("sweep", replica=replica, left=left, at_most=_PIECE, **limits)
    return int(still_left), int(removed)


async def forget_older(pool: Pool, replica: str, before_ms: int) -> int:
    """Drop every key of a replica last used before `before_ms` (Redis time): an LRU cache that has evicted one key
    has evicted what was used before it."""
    total = 0
    while dropped := await trim_piece(pool, replica, before_ms, False):
        total += dropped
    return total


async def forget(pool: Pool, record: ReplicaRecord) -> bool:
    """Remove a dead replica from the store; False if it has begun another incarnation since, or an agent holds it. The
    maintenance removes its keys later, which nobody reads any more. Raises StoreError."""
    return bool(await pool.run("forget", replica=record.replica, incarnation=record.incarnation))
