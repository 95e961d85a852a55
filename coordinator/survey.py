"""Reads for `kvgate doctor` all that it needs from a Redis: the server, KVGate's pools, and a sample of the other keys.

It writes nothing and scans nothing: it finds keys that are not KVGate's by a fixed number of RANDOMKEYs. The commands
that the user of the URL may not call are listed as refused.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coordinator.errors import StoreError, StoreRefused
from coordinator.keys import PREFIX, PoolKeys, pools_key
from coordinator.known_pools import pool_names
from coordinator.pool.hedged import slow_replicas
from coordinator.redis.address import connect, is_cluster
from coordinator.redis.checks import RANDOM_PICKS, RedisEvidence, SampledKey
from coordinator.redis.info import NOTHING_KNOWN, read_info
from coordinator.redis.time_limit import answered
from coordinator.redis.wire import Wire
from coordinator.registry import PoolState, ReplicaFigures, each, is_number, moment_of, pairs, surveyed_state, time_ms

_PINGS = 9
_OF_KVGATE = f"{PREFIX}:".encode()
_NO_TTL, _GONE = -1, -2


class UnreadableRecords(NamedTuple):
    """Records of one key that could not be read: how many so far, and when and in which field the last of them was."""

    key: str
    times: int
    last_ms: int
    field: str


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool at one moment, by Redis' clock."""

    pool: str
    state: PoolState
    figures: ReplicaFigures
    gateway_leases_ms: dict[str, int]
    """The end of each gateway's lease."""
    tick_ms: int = 0
    """The time of the last heartbeat of any gateway; 0 if there was none."""
    went_back: tuple[int, int] = (0, 0)
    """When a heartbeat last found that Redis' clock had gone back, and by how many ms; zeros if none did."""
    drained_since_ms: dict[str, int] = field(default_factory=dict)
    """When somebody drained a replica, for those that are drained."""
    slow: tuple[str, ...] = ()
    """The replicas whose first bytes are late again and again."""
    unreadable: tuple[UnreadableRecords, ...] = ()
    """Those that gateways found, and those that are there now."""


class Survey:
    """A connection that only reads. Every method raises StoreError if it breaks or takes too long."""

    def __init__(self, url: str, wire: Wire, timeout_s: float, namespace: str) -> None:
        self._url = url
        self._namespace = namespace
        self._wire = wire
        self._timeout_s = timeout_s
        self._for_pools: dict[str, Survey] = {}

    @classmethod
    async def open(cls, url: str, timeout_s: float, namespace: str = "", key: str = "") -> Survey:
        """Connect to the server that has `key` (by default the list of pools), log in, and see that it answers."""
        wire = await connect(url, key or pools_key(namespace), timeout_s, lambda _error: None)
        survey = cls(url, wire, timeout_s, namespace)
        try:
            await survey._ask("PING")
        except StoreError:
            await survey.close()
            raise
        return survey

    async def close(self) -> None:
        for survey in self._for_pools.values():
            await survey.close()
        await self._wire.close()

    async def redis(self) -> RedisEvidence:
        """The server's own figures, and a sample of its keys."""
        refused: dict[str, str] = {}
        info = await self._unless_refused(refused, "INFO", self._ask("INFO", "ALL"))
        limits = await self._unless_refused(refused, "CONFIG", self._ask("CONFIG", "GET", "hash-max-*-value"))
        return RedisEvidence(
            info=NOTHING_KNOWN if info is None else read_info(info),
            hash_value_limit_bytes=min((int(value) for value in (limits or ())[1::2]), default=None),
            ping_ms=await self._ping_ms(),
            clock_ahead_s=await self._clock_ahead_s(),
            keys=await self._unless_refused(refused, "DBSIZE", self._ask("DBSIZE")) or 0,
            sampled_keys=await self._unless_refused(refused, "RANDOMKEY", self._sample()) or (),
            refused=refused,
        )

    async def pools(self) -> list[str]:
        """The pools that any agent has ever listed."""
        return pool_names(await self._ask("SMEMBERS", pools_key(self._namespace)))

    async def for_pool(self, pool: str) -> Survey:
        """A connection to the server that has the pool. In a Redis Cluster that may be another one than this."""
        if not is_cluster(self._url):
            return self
        if pool not in self._for_pools:
            anchor = PoolKeys(pool, self._namespace).anchor
            self._for_pools[pool] = await Survey.open(self._url, self._timeout_s, self._namespace, anchor)
        return self._for_pools[pool]

    async def snapshot(self, pool: str) -> PoolSnapshot:
        """The pool as it is now. The connection must be the one that `for_pool` returns."""
        k = PoolKeys(pool, self._namespace)
        hashes = (k.replicas, k.breakers, k.active, k.agents, k.engines, k.leases, k.gateways, k.draining, k.late)
        refused: dict[str, str] = {}
        now_ms, repaired, *flat = await self._together(
            [self._now_ms(), *(self._hash(refused, key) for key in (k.unreadable, *hashes))],
        )
        replicas, breakers, active, agents, engines, leases, gateways, draining, late = flat
        state = surveyed_state(now_ms, replicas, breakers, agents, leases)
        tick = pairs(leases).get("tick", "")
        found = each(repaired, _unreadable).values()
        return PoolSnapshot(
            pool=pool,
            state=state,
            figures=ReplicaFigures.parse(active, engines),
            gateway_leases_ms=each(gateways, lambda _, text: int(text.split(" ")[1])),
            tick_ms=int(tick) if is_number(tick) else 0,
            drained_since_ms=_drained_since_ms(draining, state),
            slow=tuple(slow_replicas(late, now_ms)),
            went_back=moment_of(pairs(leases), "went_back"),
            unreadable=(*found, *(UnreadableRecords(key.rpartition(":")[2], 1, now_ms, "-") for key in refused)),
        )

    async def _sample(self) -> tuple[SampledKey, ...]:
        drawn = set(await self._together(self._wire.send("RANDOMKEY") for _ in range(RANDOM_PICKS)))
        names = sorted(name for name in drawn if name is not None and not name.startswith(_OF_KVGATE))
        ttls_ms = await self._together(self._wire.send("PTTL", name) for name in names)
        sizes = await self._together(self._size_bytes(name) for name in names)
        return tuple(
            SampledKey(name.decode("utf-8", "replace"), ttl_ms != _NO_TTL, size)
            for name, ttl_ms, size in zip(names, ttls_ms, sizes, strict=True)
            if ttl_ms != _GONE
        )

    async def _hash(self, refused: dict[str, str], key: str) -> Any:
        """Its fields and values, flat; none if somebody replaced it by another type."""
        try:
            return await self._wire.send("HGETALL", key)
        except StoreRefused as error:
            if not error.is_wrong_type:
                raise
            refused[key] = str(error)
            return ()

    async def _size_bytes(self, name: bytes) -> int:
        try:
            return int(await self._wire.send("STRLEN", name))
        except StoreRefused:  # its value is no string
            return 0

    async def _unless_refused(self, refused: dict[str, str], command: str, asked: Awaitable[Any]) -> Any:
        try:
            return await asked
        except StoreRefused as error:
            refused[command] = str(error)
            return None

    async def _ping_ms(self) -> float:
        took = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            await self._ask("PING")
            took.append(time.perf_counter() - began)
        return statistics.median(took) * 1000

    async def _clock_ahead_s(self) -> tuple[float, float]:
        asked_s = time.time()
        its_s = await self._now_ms() / 1000
        return its_s - time.time(), its_s - asked_s

    async def _now_ms(self) -> int:
        return time_ms(await self._ask("TIME"))

    async def _ask(self, *command: Any) -> Any:
        return (await self._together([self._wire.send(*command)]))[0]

    async def _together(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        return await answered(asyncio.gather(*calls), self._timeout_s)


def _drained_since_ms(draining: Any, state: PoolState) -> dict[str, int]:
    """Since when the replicas are drained; a drain belongs to one incarnation. The entry of one that sleeps is for
    older gateways (see lua/mark.lua), and cannot be read here."""
    drains = each(draining, lambda _, text: (text.partition(" ")[0], int(text.partition(" ")[2])))
    records = state.replicas
    return {
        name: since_ms
        for name, (incarnation, since_ms) in drains.items()
        if name in records and records[name].incarnation == incarnation
    }


def _unreadable(key: str, text: str) -> UnreadableRecords:
    times, last_ms, where = text.split(" ", 2)
    return UnreadableRecords(key, int(times), int(last_ms), where)
