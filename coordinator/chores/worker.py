"""The chores of a pool, done by the gateway that holds its worker lease: records that cannot be read are repaired
(repair.py), then the keys that replicas are believed to hold are trimmed.

A replica's cache is bounded, so the keys that it owns are as well. If no agent tells what it holds, keys are dropped,
least recently used first: those of an older incarnation, those that no request has used for CLAIM_TTL_MS, and those for
which its cache has no room (the engine's own capacity, from /metrics, or MAX_KEYS if that is unknown). If an agent
does, only records that are not valid any more are swept.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from coordinator.chores.reaper import Reaper
from coordinator.chores.repair import Repair, prefix_keys
from coordinator.errors import StoreError, StoreRefused
from coordinator.pool.pool import Pool
from coordinator.registry import PoolState, ReplicaRecord, is_number, readable

_log = structlog.get_logger("kvgate.worker")

CLAIM_TTL_MS = 3_600_000
UNCONFIRMED_MS = 4_000
"""Suppose an agent knows everything that a replica holds. Then a claim of this age whose request is over is wrong: an
event would have confirmed it, or the gateway that made it would have withdrawn it."""
UNCONFIRMED_RELEARNING_MS = 600_000
"""The same while the agent still relearns: then an older claim may be true without an event."""
AGENT_RETURNS_MS = 30_000
"""For this time after its agent has gone, a replica's keys are not trimmed."""
SWEEP_EVERY_MS = 60_000
MAX_KEYS = 200_000
_BATCH = 256
_TRIM_S = 0.4
"""The most per round: the next heartbeat waits for it."""
_AHEAD_MS = 1000
"""A last use that lies further in the future was written before Redis' clock went back."""


class Worker:
    """Beats for one pool, and trims it while this gateway holds the lease."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._reaper = Reaper(pool)
        self._repair = Repair(pool)
        self._sweeps: dict[str, _Sweep] = {}

    def close(self) -> None:
        """End what runs beside the heartbeat."""
        self._reaper.close()

    async def tick(self) -> None:
        """One heartbeat, and a round of chores if this gateway holds the lease. Never raises: a failing store is
        noticed elsewhere, other errors are logged.
        """
        try:
            state = await self._beat()
            self._reaper.go_on(state)
            await self._pool.subsets.keep()
            if self._pool.is_worker:
                await self._repair.repair()
                async with asyncio.timeout(_TRIM_S):
                    await self._repair.recount(state)
                    for record in state.replicas.values():
                        await self._tidy(record, state)
        except (StoreError, TimeoutError):
            return
        except Exception as error:  # nobody awaits a tick
            _log.error("chores failed", pool=self._pool.name, error=type(error).__name__)

    async def _beat(self) -> PoolState:
        """If a record makes the heartbeat fail, nobody knows who does the chores: then every gateway repairs."""
        try:
            return await self._pool.beat()
        except StoreRefused:
            await self._repair.repair()
            raise

    async def _tidy(self, record: ReplicaRecord, state: PoolState) -> None:
        await rewind(self._pool, record, state.now_ms)
        if not state.is_exact(record.replica) and not _awaits_agent(record.replica, state):
            self._sweeps.pop(record.replica, None)
            await trim(self._pool, record, state)
            return
        await forget_older(self._pool, record.replica, record.since_ms)
        claims_before_ms, life = 0, (record.incarnation, record.floor, _is_known(record.replica, state))
        if state.is_exact(record.replica):
            claims_before_ms = state.now_ms - (UNCONFIRMED_MS if life[-1] else UNCONFIRMED_RELEARNING_MS)
        sweep = self._sweeps.get(record.replica)
        if sweep is None or sweep.life != life or (sweep.end == 0 and not sweep.is_recent(state.now_ms)):
            sweep = self._sweeps[record.replica] = _Sweep(life, state.now_ms, await _held(self._pool, record.replica))
        while sweep.end:  # a round that is cut off continues in the next
            sweep.end, _ = await _sweep_batch(self._pool, record.replica, sweep.end, claims_before_ms)


def _is_known(replica: str, state: PoolState) -> bool:
    """Whether an agent tells everything that the replica holds, so that keys it has not named are not there."""
    return state.is_exact(replica) and not state.agents[replica].is_relearning


def _awaits_agent(replica: str, state: PoolState) -> bool:
    """Whether its agent has gone only lately, or may not have come back yet since the clock jumped: the next agent
    starts from what the map says."""
    until_ms = state.followed_until_ms(replica)
    return 0 <= until_ms < state.now_ms <= until_ms + AGENT_RETURNS_MS + state.uncounted_ms(until_ms)


@dataclass(slots=True)
class _Sweep:
    """One pass over a replica's keys, from the end: a removal moves only keys that were checked already."""

    life: tuple[str, int, bool]
    """Incarnation, floor, and whether everything that it holds is known: if one changes, another pass begins."""
    began_ms: int
    end: int
    """How many keys are left to check."""

    def is_recent(self, now_ms: int) -> bool:
        """Whether the next pass is not due yet. The clock may have gone back."""
        return self.began_ms <= now_ms <= self.began_ms + SWEEP_EVERY_MS


async def _held(pool: Pool, replica: str) -> int:
    return int(await pool.read("ZCARD", pool.keys.held(replica)))


async def _sweep_batch(pool: Pool, replica: str, end: int, claims_before_ms: int) -> tuple[int, int]:
    """Check the keys before `end`; returns how many are left to check, and how many were removed."""
    k, start = pool.keys, max(0, end - _BATCH)
    held = k.held(replica)
    found, gateways = await asyncio.gather(pool.read("ZRANGE", held, start, end - 1), pool.read("HKEYS", k.gateways))
    keys = prefix_keys(pool, replica, found)
    swept = await pool.run(
        "sweep",
        replica=replica,
        claims_before_ms=claims_before_ms,
        keys=keys,
        gateways=[readable(gateway) for gateway in gateways],
    )
    return start, int(swept)


async def sweep(pool: Pool, replica: str, claims_before_ms: int = 0) -> int:
    """Remove a replica's keys whose records are not valid any more; returns how many."""
    end, total = await _held(pool, replica), 0
    while end:
        end, swept = await _sweep_batch(pool, replica, end, claims_before_ms)
        total += swept
    return total


async def trim(pool: Pool, record: ReplicaRecord, state: PoolState) -> int:
    """Drop what the replica no longer holds; returns the number of keys dropped."""
    unused_before_ms = state.now_ms - CLAIM_TTL_MS
    stale_before_ms = max(record.since_ms, unused_before_ms - state.uncounted_ms(unused_before_ms))
    dropped = await forget_older(pool, record.replica, stale_before_ms)
    held = pool.keys.held(record.replica)
    while excess := await _excess_keys(pool, record):
        oldest = await pool.read("ZRANGE", held, 0, min(excess, _BATCH) - 1, "WITHSCORES")
        if not oldest:
            break
        before_ms = int(min(float(oldest[-1]), state.now_ms)) + 1  # nothing was used in the future
        count = await pool.drop(record.replica, before_ms, prefix_keys(pool, record.replica, oldest[::2]))
        if count == 0:
            break
        dropped += count
    return dropped


async def forget_older(pool: Pool, replica: str, before_ms: int) -> int:
    """Drop every key of a replica last used before `before_ms` (Redis time): an LRU cache that has evicted one key
    has evicted what was used before it."""
    dropped = 0
    while True:
        found = await pool.read("ZRANGEBYSCORE", pool.keys.held(replica), "-inf", f"({before_ms}", "LIMIT", 0, _BATCH)
        if not found:
            return dropped
        count = await pool.drop(replica, before_ms, prefix_keys(pool, replica, found))
        if count == 0:
            return dropped  # all of them were used meanwhile, or the replica's record cannot be read
        dropped += count


async def rewind(pool: Pool, record: ReplicaRecord, now_ms: int) -> int:
    """Count a replica's keys whose last use lies in the future as used now; returns how many there were."""
    held, total = pool.keys.held(record.replica), 0
    latest_ms = max(now_ms, record.since_ms) + _AHEAD_MS
    while True:
        found = await pool.read("ZRANGEBYSCORE", held, f"({latest_ms}", "+inf", "LIMIT", 0, _BATCH)
        if not found:
            return total
        keys = [key.decode() for key in found]
        asked = pool.run("rewind", replica=record.replica, ahead_ms=_AHEAD_MS, moved_before=total, keys=keys)
        moved = int(await asked)
        if moved == 0:
            return total
        total += moved


async def forget(pool: Pool, record: ReplicaRecord) -> bool:
    """Remove a dead replica and all that it owns from the store; False if it has begun another incarnation since, or an
    agent holds it. Raises StoreError."""
    one = {"replica": record.replica, "incarnation": record.incarnation}
    now_ms = int(await pool.run("forget", **one, keys_dropped=False))
    if now_ms == 0:
        return False
    if await rewind(pool, record, now_ms) or record.since_ms > now_ms:
        now_ms = max(now_ms, record.since_ms) + _AHEAD_MS
    await forget_older(pool, record.replica, now_ms)  # keys that a new incarnation claims from now on stay
    return bool(await pool.run("forget", **one, keys_dropped=True))


async def _excess_keys(pool: Pool, record: ReplicaRecord) -> int:
    """About how many of the replica's keys its cache has no room for, by their mean size; 0 when all fit."""
    held = int(await pool.read("ZCARD", pool.keys.held(record.replica)))
    if not record.capacity_tokens:
        return max(0, held - MAX_KEYS)
    told = await pool.read("HGET", pool.keys.owned_tokens, record.replica) or b"0"
    owned_tokens = int(told) if is_number(told) else 0  # otherwise it is about to be summed again
    if owned_tokens <= record.capacity_tokens:
        return 0
    return max(1, held * (owned_tokens - record.capacity_tokens) // owned_tokens)
