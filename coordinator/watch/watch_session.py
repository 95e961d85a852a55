"""What whoever holds the lease knows of the store, and does for it, a tick at a time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import structlog

from coordinator.errors import StoreError, StoreRefused
from coordinator.keys import WATCHER
from coordinator.redis.address import connect_as
from coordinator.redis.time_limit import answered
from coordinator.redis.wire import Wire
from coordinator.scripts import load
from coordinator.watch.chunk_schedule import ChunkSchedule
from coordinator.watch.conditions import Condition, Lately, conditions
from coordinator.watch.figures import Estimate, Info, Sample, Samples, read_info
from coordinator.watch.kinds import KINDS, Kind, kind_of
from coordinator.watch.listener import EVICTED, Listener

_log = structlog.get_logger("kvgate.watch")

TICK_S = 0.1
ANSWER_S = 2.0
_CONNECT_S = 1.0
_SILENCE_S = 5.0
"""The lease is renewed every second, which is an event as well: who hears nothing for so long is deaf."""
_LISTEN_AGAIN_S = 10.0
_AT_ONCE = 20
"""Chunks in one call of the script: some 100 us."""
_TENDED = 200
"""In one tick: 2000 chunks/s."""
_LOOKS = 13


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """`chunk_ttl_s` is what a chunk without a TTL gets."""

    chunk_ttl_s: int = 86_400
    samples_per_s: int = 100
    look_s: float = 5.0
    """Between two looks at INFO; "lately" is the last twelve of them."""


@dataclass(frozen=True, slots=True)
class Report:
    """The store at the last look. Counts are this tenure's."""

    info: Info
    estimate: Estimate
    conditions: Mapping[Condition, str]
    chunks: int
    """Known by name."""
    ttls_given: int
    renewed: int
    samples: int
    evicted: Mapping[Kind, int]
    """As far as evictions are heard of."""
    hears: bool
    largest_chunk_bytes: int
    """Of those looked at lately."""


class _Look(NamedTuple):
    refused_writes: int
    ttls_given: int
    largest_chunk_bytes: int
    evicted_coordination: str
    denied: str


class _Tended(NamedTuple):
    did: str
    ttl_s: float
    bytes: int


class WatchSession:
    """Begins when a lease is taken. `tick` raises StoreError when the connection breaks."""

    def __init__(self, wire: Wire, allow_oom: bool, url: str, settings: WatchSettings) -> None:
        self.report: Report | None = None
        self._wire = wire
        self._script = load("tend", allow_oom)
        self._url = url
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._rota = ChunkSchedule()
        self._samples = Samples()
        self._counts: Counter[str] = Counter()
        self._evicted: Counter[Kind] = Counter()
        self._looks: deque[_Look] = deque(maxlen=_LOOKS)
        self._look_due_s = self._loop.time() + settings.look_s
        self._life_s = 0.0
        """How long chunks live: as one said that was heard, or until then the longest TTL that was seen."""
        self._has_heard_life = False
        self._listener: Listener | None = None
        self._listen_due_s = 0.0
        self._heard_s = float("-inf")
        self._written: set[str] = set()
        """Chunks that were heard of and not looked at yet: what is left of their TTL is all of it."""
        self._denied = ""
        self._largest_bytes = 0
        self._evicted_coordination = ""

    async def tick(self) -> None:
        """The chunks that are due, a few samples, and a look at everything when it is time for one."""
        await self._listen_when_due()
        await self._tend(self._rota.take(self._loop.time(), _TENDED))
        await self._sample(max(1, round(self._settings.samples_per_s * TICK_S)))
        if self._loop.time() >= self._look_due_s:
            self._look_due_s = self._loop.time() + self._settings.look_s
            await self._look()

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    # -- hearing -------------------------------------------------------------------------------------------------

    @property
    def _hears(self) -> bool:
        return self._loop.time() - self._heard_s < _SILENCE_S

    async def _listen_when_due(self) -> None:
        """Listen, and anew after a silence: nobody tells of a connection that was lost on the way."""
        now_s = self._loop.time()
        if self._hears or now_s < self._listen_due_s:
            return
        self._listen_due_s = now_s + _LISTEN_AGAIN_S
        await self.close()
        try:
            self._listener = await connect_as(Listener, self._url, WATCHER, _CONNECT_S, lambda _error: None)
            await answered(self._listener.listen(self._heard), _CONNECT_S)
        except StoreRefused as error:
            self._denied = str(error)
        except StoreError:
            return  # where Redis is away, the other connection tells

    def _heard(self, event: str, key: str) -> None:
        if key == WATCHER:
            self._heard_s = self._loop.time()
            return
        kind = kind_of(key)
        if event == EVICTED:
            self._evicted[kind] += 1
            self._rota.forget(key)
            self._written.discard(key)
            if kind == "coordination":
                self._evicted_coordination = key
        elif kind == "chunk" and self._rota.meet(key, self._loop.time()):
            self._written.add(key)

    # -- keys ----------------------------------------------------------------------------------------------------

    async def _sample(self, count: int) -> None:
        """Meet some keys by chance: chunks are tended, of others it is noted what they take."""
        met: dict[Kind, list[bytes]] = {kind: [] for kind in KINDS}
        for key in await self._answers([self._wire.send("RANDOMKEY") for _ in range(count)]):
            if key:
                self._counts["samples"] += 1
                met[kind_of(key.decode(errors="replace"))].append(key)
        chunks = [key.decode(errors="replace") for key in met["chunk"]]
        for key in chunks:
            self._rota.meet(key, self._loop.time())
        for tended in await self._tend(chunks):
            self._samples.add(Sample("chunk", tended.bytes, has_ttl=True))
        await self._weigh("coordination", met["coordination"])
        await self._weigh("other", met["other"])

    async def _weigh(self, kind: Kind, keys: Sequence[bytes]) -> None:
        """Note what they take. Others' keys may be out of this user's reach: then they weigh nothing."""
        sizes = [self._wire.send("MEMORY", "USAGE", key) for key in keys]
        ttls_ms = [self._wire.send("PTTL", key) for key in keys]
        replies = await self._answers([*sizes, *ttls_ms], is_theirs=kind == "other")
        for size_bytes, ttl_ms in zip(replies[: len(keys)], replies[len(keys) :], strict=True):
            self._samples.add(Sample(kind, size_bytes or 0, has_ttl=(ttl_ms or 0) > 0))

    async def _tend(self, keys: Sequence[str]) -> list[_Tended]:
        """Look after chunks; those that are gone are left out."""
        written = self._written.intersection(keys)
        self._written -= written
        # None of these has lived long enough for a new life.
        found = await self._run_tend(list(written), [0.0] * len(written))
        for tended in found:
            if tended.did == "kept":
                self._life_s, self._has_heard_life = math.ceil(tended.ttl_s), True
        others = [key for key in keys if key not in written]
        met = await self._run_tend(others, [self._rota.life_s(key) or self._life_s for key in others])
        if not self._has_heard_life:
            self._life_s = max([self._life_s, *(tended.ttl_s for tended in met if tended.did == "kept")])
        return found + met

    async def _run_tend(self, keys: Sequence[str], lives_s: Sequence[float]) -> list[_Tended]:
        """See lua/tend.lua."""
        pairs = list(zip(keys, lives_s, strict=True))
        parts = [pairs[i : i + _AT_ONCE] for i in range(0, len(pairs), _AT_ONCE)]
        ttl_ms = self._settings.chunk_ttl_s * 1000
        script, chunks = self._script, [[key for key, _ in part] for part in parts]
        lives_ms = [[round(life_s * 1000) for _, life_s in part] for part in parts]
        runs = [script.operands(chunks=a, ttl_ms=ttl_ms, lives_ms=b) for a, b in zip(chunks, lives_ms, strict=True)]
        replies = await self._answers([self._wire.run(script, operands) for operands in runs])
        found, now_s = list[_Tended](), self._loop.time()
        for part, flat in zip(parts, replies, strict=True):
            if flat is None:
                continue
            for (key, life_s), did, ttl_ms, size_bytes in zip(part, flat[::3], flat[1::3], flat[2::3], strict=True):
                tended = _Tended(did.decode(), ttl_ms / 1000, size_bytes)
                if tended.did == "gone":
                    self._rota.forget(key)
                    continue
                found.append(tended)
                self._counts[tended.did] += 1
                self._largest_bytes = max(self._largest_bytes, size_bytes)
                self._rota.seen(key, tended.ttl_s, size_bytes, max(life_s, tended.ttl_s), now_s)
        return found

    # -- the look --------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        info_text, keys = await self._answers([self._wire.send("INFO", "all"), self._wire.send("DBSIZE")])
        if info_text is None:
            raise StoreRefused(self._denied)  # without INFO there is nothing to say
        info, estimate = read_info(info_text), self._samples.estimate(keys or 0)
        if self._hears:
            # Chunks are large and few: among many other keys, chance may not meet enough of them.
            estimate = replace(estimate, evictable_bytes=max(estimate.evictable_bytes, self._rota.bytes))
        if not self._looks:
            self._looks.append(_Look(info.refused_writes, 0, 0, "", ""))
        given, largest_bytes = self._counts["given"], self._largest_bytes
        self._looks.append(_Look(info.refused_writes, given, largest_bytes, self._evicted_coordination, self._denied))
        self._largest_bytes, self._evicted_coordination, self._denied = 0, "", ""
        found = conditions(info, estimate, self._lately())
        _tell(self.report.conditions if self.report else {}, found)
        self.report = Report(
            info=info,
            estimate=estimate,
            conditions=found,
            chunks=len(self._rota),
            ttls_given=self._counts["given"],
            renewed=self._counts["renewed"],
            samples=self._counts["samples"],
            evicted=dict(self._evicted),
            hears=self._hears,
            largest_chunk_bytes=max(look.largest_chunk_bytes for look in self._looks),
        )

    def _lately(self) -> Lately:
        first, last = self._looks[0], self._looks[-1]
        return Lately(
            has_chunks=self._counts["given"] + self._counts["kept"] + self._counts["renewed"] > 0,
            refused_writes=max(0, last.refused_writes - first.refused_writes),
            ttls_given=last.ttls_given - first.ttls_given,
            largest_chunk_bytes=max(look.largest_chunk_bytes for look in self._looks),
            evicted_coordination=next(
                (look.evicted_coordination for look in self._looks if look.evicted_coordination), ""
            ),
            hears=self._hears,
            denied=max(look.denied for look in self._looks),
        )

    async def _answers(self, replies: Sequence[asyncio.Future[Any]], is_theirs: bool = False) -> list[Any]:
        """None for what Redis refused, which is noted unless it was about somebody else's keys."""
        found = await answered(asyncio.gather(*replies, return_exceptions=True), ANSWER_S)
        for each in found:
            if isinstance(each, StoreRefused):
                self._denied = self._denied if is_theirs else str(each)
            elif isinstance(each, BaseException):
                raise each
        return [None if isinstance(each, StoreRefused) else each for each in found]


def _tell(before: Mapping[Condition, str], now: Mapping[Condition, str]) -> None:
    """Say what has begun, once, and what is over."""
    for condition, problem in now.items():
        if condition not in before:
            _log.warning("store trouble", condition=condition, problem=problem)
    for condition in before.keys() - now.keys():
        _log.info("store trouble over", condition=condition)
