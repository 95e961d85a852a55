"""Reading all that a Redis tells, for `kvgate doctor`: of itself, of KVGate's pools, and of what else is in it.

Nothing is written and nothing scanned: keys that are not KVGate's are found by RANDOMKEY, so many times and no more.
What the user of the URL may not ask is told as refused.
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
from coordinator.redis.address import connect, is_cluster
from coordinator.redis.info import read_fields
from coordinator.redis.time_limit import answered
from coordinator.redis.wire import Wire
from coordinator.registry import PoolState, each, is_number, moment_of, pairs, parse_pool_state

SAMPLES = 1000
_PINGS = 9
_OF_KVGATE = f"{PREFIX}:".encode()
_NO_TTL, _GONE = -1, -2


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key that is not KVGate's."""

    name: str
    has_ttl: bool
    size_bytes: int
    """0 where it is no string."""


@dataclass(frozen=True, slots=True)
class Server:
    """A Redis at one moment. `refused` holds, by command, why it was not answered; what that would tell is missing."""

    info: dict[str, str] = field(default_factory=dict)
    hash_value_limit_bytes: int | None = None
    """Up to which length of its values a hash is kept compact."""
    ping_ms: float = 0.0
    """The median of a few."""
    clock_ahead_s: tuple[float, float] = (0.0, 0.0)
    """How far its clock is ahead of this machine's: between these two."""
    keys: int = 0
    foreign: tuple[ForeignKey, ...] = ()
    """Those that SAMPLES random keys brought to light."""
    refused: dict[str, str] = field(default_factory=dict)


class Unreadable(NamedTuple):
    """Records of a key that could not be read: how many so far, and where the last of them was when."""

    key: str
    times: int
    last_ms: int
    field: str


@dataclass(frozen=True, slots=True)
class Look:
    """A pool at one moment, by Redis' clock."""

    pool: str
    fleet: PoolState
    gateway_leases_ms: dict[str, int]
    """Until when each gateway's lease lasts."""
    oldest_unapplied_ms: dict[str, int]
    """Of replicas whose stream has entries that are not in the map yet: how long ago the oldest was published."""
    tick_ms: int = 0
    """When any gateway beat last; 0 where none ever did."""
    went_back: tuple[int, int] = (0, 0)
    """When a beat last found that Redis' clock had gone back, and by how many ms; zeros where none did."""
    unreadable: tuple[Unreadable, ...] = ()
    """What gateways could not read, and what cannot be read now."""


class Survey:
    """A connection that only reads. Every method raises StoreError when it breaks or takes too long."""

    def __init__(self, url: str, wire: Wire, timeout_s: float, namespace: str) -> None:
        self._url = url
        self._namespace = namespace
        self._wire = wire
        self._timeout_s = timeout_s
        self._of_pools: dict[str, Survey] = {}

    @classmethod
    async def open(cls, url: str, timeout_s: float, namespace: str = "", key: str = "") -> Survey:
        """Connect to the server that has the key (that of the list of pools, where left out), log in and see that it
        answers."""
        wire = await connect(url, key or pools_key(namespace), timeout_s, lambda _error: None)
        survey = cls(url, wire, timeout_s, namespace)
        try:
            await survey._ask("PING")
        except StoreError:
            await survey.close()
            raise
        return survey

    async def close(self) -> None:
        for survey in self._of_pools.values():
            await survey.close()
        await self._wire.close()

    async def server(self) -> Server:
        """What the server says of itself, and a sample of its keys."""
        refused: dict[str, str] = {}
        info = await self._unless_refused(refused, "INFO", self._ask("INFO", "ALL"))
        limits = await self._unless_refused(refused, "CONFIG", self._ask("CONFIG", "GET", "hash-max-*-value"))
        return Server(
            info=read_fields(info or b""),
            hash_value_limit_bytes=min((int(value) for value in (limits or ())[1::2]), default=None),
            ping_ms=await self._ping_ms(),
            clock_ahead_s=await self._clock_ahead_s(),
            keys=await self._unless_refused(refused, "DBSIZE", self._ask("DBSIZE")) or 0,
            foreign=await self._unless_refused(refused, "RANDOMKEY", self._foreign()) or (),
            refused=refused,
        )

    async def pools(self) -> list[str]:
        """The pools that any agent has ever told of."""
        return pool_names(await self._ask("SMEMBERS", pools_key(self._namespace)))

    async def of(self, pool: str) -> Survey:
        """A connection to the server that has the pool: this one, but in a Redis Cluster."""
        if not is_cluster(self._url):
            return self
        if pool not in self._of_pools:
            anchor = PoolKeys(pool, self._namespace).anchor
            self._of_pools[pool] = await Survey.open(self._url, self._timeout_s, self._namespace, anchor)
        return self._of_pools[pool]

    async def look(self, pool: str) -> Look:
        """A pool as it is now, where this is a connection `of` it."""
        k = PoolKeys(pool, self._namespace)
        hashes = (k.replicas, k.breakers, k.active, k.agents, k.engines, k.leases, k.gateways, k.cursors)
        refused: dict[str, str] = {}
        now_ms, mended, *flat = await self._together(
            [self._now_ms(), *(self._hash(refused, key) for key in (k.unreadable, *hashes))],
        )
        replicas, breakers, active, agents, engines, leases, gateways, cursors = flat
        fleet = parse_pool_state([b"ok", (), replicas, breakers, b"", now_ms, active, agents, engines, leases, 0])
        applied = {replica: cursor.split(" ")[0] for replica, cursor in pairs(cursors).items()}
        tick = pairs(leases).get("tick", "")
        found = each(mended, _unreadable).values()
        oldest = await self._together(
            self._oldest_after_ms(k.events(replica), applied.get(replica, "0")) for replica in fleet.agents
        )
        return Look(
            pool=pool,
            fleet=fleet,
            gateway_leases_ms=each(gateways, lambda _, text: int(text.split(" ")[1])),
            oldest_unapplied_ms={
                replica: now_ms - at_ms for replica, at_ms in zip(fleet.agents, oldest, strict=True) if at_ms
            },
            tick_ms=int(tick) if is_number(tick) else 0,
            went_back=moment_of(pairs(leases), "went_back"),
            unreadable=(*found, *(Unreadable(key.rpartition(":")[2], 1, now_ms, "-") for key in refused)),
        )

    async def _oldest_after_ms(self, stream: str, entry: str) -> int:
        """When the first entry behind `entry` was published; 0 where there is none."""
        try:
            reply = await self._wire.send("XREAD", "COUNT", 1, "STREAMS", stream, entry)
        except StoreRefused:  # no cursor, or no stream: it is about to be mended
            return 0
        return int(reply[0][1][0][0].split(b"-")[0]) if reply else 0

    async def _foreign(self) -> tuple[ForeignKey, ...]:
        drawn = set(await self._together(self._wire.send("RANDOMKEY") for _ in range(SAMPLES)))
        names = sorted(name for name in drawn if name is not None and not name.startswith(_OF_KVGATE))
        ttls_ms = await self._together(self._wire.send("PTTL", name) for name in names)
        sizes = await self._together(self._size_bytes(name) for name in names)
        return tuple(
            ForeignKey(name.decode("utf-8", "replace"), ttl_ms != _NO_TTL, size)
            for name, ttl_ms, size in zip(names, ttls_ms, sizes, strict=True)
            if ttl_ms != _GONE
        )

    async def _hash(self, refused: dict[str, str], key: str) -> Any:
        """Its fields and values, flat; none where somebody has made another type of it."""
        try:
            return await self._wire.send("HGETALL", key)
        except StoreRefused as error:
            if "WRONGTYPE" not in str(error):
                raise
            refused[key] = str(error)
            return ()

    async def _size_bytes(self, name: bytes) -> int:
        try:
            return int(await self._wire.send("STRLEN", name))
        except StoreRefused:  # it is of another type
            return 0

    async def _unless_refused(self, refused: dict[str, str], what: str, asked: Awaitable[Any]) -> Any:
        try:
            return await asked
        except StoreRefused as error:
            refused[what] = str(error)
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
        seconds, microseconds = await self._ask("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def _ask(self, *command: Any) -> Any:
        return (await self._together([self._wire.send(*command)]))[0]

    async def _together(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        return await answered(asyncio.gather(*calls), self._timeout_s)


def _unreadable(key: str, text: str) -> Unreadable:
    times, last_ms, where = text.split(" ", 2)
    return Unreadable(key, int(times), int(last_ms), where)
