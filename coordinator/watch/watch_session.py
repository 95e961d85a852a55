"""What the process that holds the lease does with the store, a tick at a time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import hiredis
import structlog

from coordinator.errors import StoreDown, StoreError, StoreRefused
from coordinator.keys import WATCHER
from coordinator.redis.address import connect_as
from coordinator.redis.checks import LARGE_ALLOCATION_BYTES, ChunkEvidence, LastMinute, RedisEvidence, conditions
from coordinator.redis.info import RedisInfo, read_info
from coordinator.redis.time_limit import answered
from coordinator.redis.wire import _INCOMPLETE, Wire
from coordinator.watch.chunk_schedule import ChunkSchedule
from coordinator.watch.key_samples import KEY_KINDS, Estimate, KeyKind, Sample, Samples, kind_of

_log = structlog.get_logger("kvgate.watch")

TICK_S = 0.1
ANSWER_S = 2.0
_CONNECT_S = 1.0
_SILENCE_S = 5.0
"""The lease is renewed every second, which is an event as well: after such a silence, no events arrive."""
_LISTEN_AGAIN_S = 10.0
_CHUNKS_PER_CALL = 20
"""One call of the script takes Redis some 100 us."""
_CHUNKS_PER_TICK = 200
"""2000 chunks/s."""
SAMPLES_PER_S = 100
"""Random keys that are read, to find unreported chunks and to see what takes the memory. Each costs Redis 5 us."""
INFO_EVERY_S = 5.0
"""The time between two readings of INFO. "The last minute" is the last twelve of them."""
_READINGS = 13

_RUNS = "eval", "evalsha"
_SET, _EVICTED = "set", "evicted"
OnEvent = Callable[[str, str], None]
"""Is called with an event's name and its key."""


@dataclass(frozen=True, slots=True)
class Report:
    """The store at the last reading of INFO. Counts are those of this session."""

    info: RedisInfo
    estimate: Estimate
    conditions: Mapping[str, str]
    """What is wrong, by the names in coordinator/redis/checks.py, in words."""
    chunks: int
    """The chunks whose names are known."""
    ttls_given: int
    renewed: int
    samples: int
    evicted: Mapping[KeyKind, int]
    """As far as events told of evictions."""
    hears: bool
    largest_chunk_bytes: int
    """In the last minute."""
    scripts_per_s: float = 0.0
    script_us: float = 0.0
    """How many scripts Redis ran since the reading before, and how long one took on average."""


class KeyEventListener(Wire):
    """A connection that receives keyspace events (`notify-keyspace-events E$e`). Nobody waits for replies on it.

    It reads bytes as they come: redis-py's PubSub costs three times the CPU and holds the event loop during bursts
    (docs/adr/0009).
    """

    async def listen(self, on_event: OnEvent) -> None:
        """Subscribe to the events of this connection's database. Raises StoreError if Redis does not allow that."""
        self._on_event: OnEvent = on_event
        database = self._connection.db
        self._events = {f"__keyevent@{database}__:{event}".encode(): event for event in (_SET, _EVICTED)}
        for channel in self._events:
            await self.send("SUBSCRIBE", channel)

    def data_received(self, data: bytes) -> None:
        replies = self._replies
        try:
            replies.feed(data)
            while (reply := replies.gets()) is not _INCOMPLETE:
                self._take(reply)
        except hiredis.ProtocolError as error:
            self._break(StoreDown(f"connection to Redis lost: {error}"))

    def _take(self, reply: Any) -> None:
        if isinstance(reply, list) and reply[0] == b"message":
            _, channel, key = reply
            self._on_event(self._events[channel], key.decode(errors="replace"))
        else:  # the reply to SUBSCRIBE
            self._answer(self._pending.popleft(), reply)


class _Reading(NamedTuple):
    """What one reading of INFO tells. The first two fields count from the beginning; the others count since the last
    reading."""

    refused_writes: int
    ttls_given: int
    largest_chunk_bytes: int
    evicted_coordination: str
    denied: str


class _Tended(NamedTuple):
    """What the script `tend` did with a chunk."""

    did: str
    ttl_s: float
    bytes: int


class WatchSession:
    """Begins when the lease is taken. `tick` raises StoreError if the connection breaks."""

    def __init__(self, wire: Wire, url: str, chunk_ttl_s: int) -> None:
        """`chunk_ttl_s` is the TTL that a chunk without one gets."""
        self.report: Report | None = None
        self._wire = wire
        self._url = url
        self._chunk_ttl_s = chunk_ttl_s
        self._loop = asyncio.get_running_loop()
        self._schedule = ChunkSchedule()
        self._samples = Samples()
        self._counts: Counter[str] = Counter()
        self._evicted: Counter[KeyKind] = Counter()
        self._readings: deque[_Reading] = deque(maxlen=_READINGS)
        self._ran: tuple[float, int, float] | None = None
        """When INFO was read last, and how many scripts had run for how long."""
        self._reading_due_s = self._loop.time() + INFO_EVERY_S
        self._life_s = 0.0
        """The TTL with which chunks are written. It is that of the last chunk whose SET was heard; until one is heard,
        the longest TTL that was seen."""
        self._has_heard_life = False
        self._listener: KeyEventListener | None = None
        self._listen_due_s = 0.0
        self._heard_s = float("-inf")
        self._written: set[str] = set()
        """Chunks whose SET was heard and that were not looked at yet. Their TTL is still a whole life."""
        self._denied = ""
        self._largest_bytes = 0
        self._evicted_coordination = ""

    async def tick(self) -> None:
        """Look after the chunks that are due, take a few samples, and read INFO if that is due."""
        await self._listen_when_due()
        await self._tend(self._schedule.take(self._loop.time(), _CHUNKS_PER_TICK))
        await self._sample(max(1, round(SAMPLES_PER_S * TICK_S)))
        if self._loop.time() >= self._reading_due_s:
            self._reading_due_s = self._loop.time() + INFO_EVERY_S
            await self._read_info()

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    # -- events --------------------------------------------------------------------------------------------------

    @property
    def _hears(self) -> bool:
        return self._loop.time() - self._heard_s < _SILENCE_S

    async def _listen_when_due(self) -> None:
        """Connect a listener, and a new one after a silence: a connection may be lost without a word."""
        now_s = self._loop.time()
        if self._hears or now_s < self._listen_due_s:
            return
        self._listen_due_s = now_s + _LISTEN_AGAIN_S
        await self.close()
        try:
            self._listener = await connect_as(KeyEventListener, self._url, WATCHER, _CONNECT_S, lambda _error: None)
            await answered(self._listener.listen(self._on_event), _CONNECT_S)
        except StoreRefused as error:
            self._denied = str(error)
        except StoreError:
            return  # if Redis is away, the other connection breaks, too

    def _on_event(self, event: str, key: str) -> None:
        if key == WATCHER:
            self._heard_s = self._loop.time()
            return
        kind = kind_of(key)
        if event == _EVICTED:
            self._evicted[kind] += 1
            self._schedule.forget(key)
            self._written.discard(key)
            if kind == "coordination":
                self._evicted_coordination = key
        elif kind == "chunk" and self._schedule.add(key, self._loop.time()):
            self._written.add(key)

    # -- keys ----------------------------------------------------------------------------------------------------

    async def _sample(self, count: int) -> None:
        """Pick random keys. Look after the chunks among them, and note the size of the others."""
        found: dict[KeyKind, list[bytes]] = {kind: [] for kind in KEY_KINDS}
        for key in await self._answers([self._wire.send("RANDOMKEY") for _ in range(count)]):
            if key:
                self._counts["samples"] += 1
                found[kind_of(key.decode(errors="replace"))].append(key)
        chunks = [key.decode(errors="replace") for key in found["chunk"]]
        for key in chunks:
            self._schedule.add(key, self._loop.time())
        for tended in await self._tend(chunks):
            self._samples.add(Sample("chunk", tended.bytes, has_ttl=True))
        await self._weigh("coordination", found["coordination"])
        await self._weigh("other", found["other"])

    async def _weigh(self, kind: KeyKind, keys: Sequence[bytes]) -> None:
        """Note the size of keys. If the user has no rights on somebody else's key, its size counts as 0."""
        sizes = [self._wire.send("MEMORY", "USAGE", key) for key in keys]
        ttls_ms = [self._wire.send("PTTL", key) for key in keys]
        replies = await self._answers([*sizes, *ttls_ms], is_theirs=kind == "other")
        for size_bytes, ttl_ms in zip(replies[: len(keys)], replies[len(keys) :], strict=True):
            self._samples.add(Sample(kind, size_bytes or 0, has_ttl=(ttl_ms or 0) > 0))

    async def _tend(self, keys: Sequence[str]) -> list[_Tended]:
        """Look after chunks. Chunks that are gone are left out of the answer."""
        written = self._written.intersection(keys)
        self._written -= written
        # A life of 0 renews none of these: they were just written.
        found = await self._run_tend(list(written), [0.0] * len(written))
        for tended in found:
            if tended.did == "kept":
                self._life_s, self._has_heard_life = math.ceil(tended.ttl_s), True
        others = [key for key in keys if key not in written]
        older = await self._run_tend(others, [self._schedule.life_s(key) or self._life_s for key in others])
        if not self._has_heard_life:
            self._life_s = max([self._life_s, *(tended.ttl_s for tended in older if tended.did == "kept")])
        return found + older

    async def _run_tend(self, keys: Sequence[str], lives_s: Sequence[float]) -> list[_Tended]:
        """Run lua/tend.lua on chunks, each with the TTL that it was written with."""
        pairs = list(zip(keys, lives_s, strict=True))
        parts = [pairs[i : i + _CHUNKS_PER_CALL] for i in range(0, len(pairs), _CHUNKS_PER_CALL)]
        asked = []
        for part in parts:
            lives = {"ttl_ms": self._chunk_ttl_s * 1000, "lives_ms": [round(life_s * 1000) for _, life_s in part]}
            asked.append(self._wire.ask_script("tend", chunks=[key for key, _ in part], **lives))
        replies = await self._answers(asked)
        found, now_s = list[_Tended](), self._loop.time()
        for part, flat in zip(parts, replies, strict=True):
            if flat is None:
                continue
            for (key, life_s), did, ttl_ms, size_bytes in zip(part, flat[::3], flat[1::3], flat[2::3], strict=True):
                tended = _Tended(did.decode(), ttl_ms / 1000, size_bytes)
                if tended.did == "gone":
                    self._schedule.forget(key)
                    continue
                found.append(tended)
                self._counts[tended.did] += 1
                self._largest_bytes = max(self._largest_bytes, size_bytes)
                self._schedule.checked(key, tended.ttl_s, size_bytes, max(life_s, tended.ttl_s), now_s)
        return found

    # -- the report ----------------------------------------------------------------------------------------------

    async def _read_info(self) -> None:
        info_text, keys = await self._answers([self._wire.send("INFO", "all"), self._wire.send("DBSIZE")])
        if info_text is None:
            raise StoreRefused(self._denied)  # without INFO there is nothing to report
        info, estimate = read_info(info_text), self._samples.estimate(keys or 0)
        if self._hears:
            # Chunks are large and few: among many other keys, random picks may find too few of them.
            estimate = replace(estimate, evictable_bytes=max(estimate.evictable_bytes, self._schedule.bytes))
        if not self._readings:
            self._readings.append(_Reading(info.refused_writes, 0, 0, "", ""))
        given, largest_bytes = self._counts["given"], self._largest_bytes
        self._readings.append(
            _Reading(info.refused_writes, given, largest_bytes, self._evicted_coordination, self._denied)
        )
        self._largest_bytes, self._evicted_coordination, self._denied = 0, "", ""
        last_minute = self._last_minute(estimate)
        found = conditions(RedisEvidence(info, last_minute=last_minute))
        _log_changes(self.report.conditions if self.report else {}, found)
        scripts_per_s, script_us = self._pace(info)
        self.report = Report(
            info=info,
            estimate=estimate,
            conditions=found,
            chunks=len(self._schedule),
            ttls_given=self._counts["given"],
            renewed=self._counts["renewed"],
            samples=self._counts["samples"],
            evicted=dict(self._evicted),
            hears=self._hears,
            largest_chunk_bytes=last_minute.chunks.largest_bytes,
            scripts_per_s=scripts_per_s,
            script_us=script_us,
        )

    def _pace(self, info: RedisInfo) -> tuple[float, float]:
        """How many scripts Redis has run in a second since the last reading, and the mean time of one in us."""
        calls, seconds = sum(info.calls[name] for name in _RUNS), sum(info.seconds[name] for name in _RUNS)
        now_s, (before_s, calls_before, seconds_before) = self._loop.time(), self._ran or (0.0, 0, 0.0)
        self._ran = now_s, calls, seconds
        if not before_s or calls <= calls_before:  # the first reading, or Redis began to count anew
            return 0.0, 0.0
        new = calls - calls_before
        return new / (now_s - before_s), (seconds - seconds_before) / new * 1e6

    def _last_minute(self, estimate: Estimate) -> LastMinute:
        readings, first, last = self._readings, self._readings[0], self._readings[-1]
        chunks = ChunkEvidence(
            found_any=self._counts["given"] + self._counts["kept"] + self._counts["renewed"] > 0,
            without_ttl=last.ttls_given - first.ttls_given,
            largest_bytes=max(reading.largest_chunk_bytes for reading in readings),
            large_bytes=LARGE_ALLOCATION_BYTES,
            how="in the last minute",
        )
        return LastMinute(
            chunks=chunks,
            refused_writes=max(0, last.refused_writes - first.refused_writes),
            evictable_bytes=estimate.evictable_bytes,
            coordination_bytes=estimate.bytes["coordination"],
            evicted_coordination=next(
                (reading.evicted_coordination for reading in readings if reading.evicted_coordination), ""
            ),
            hears_events=self._hears,
            denied=max(reading.denied for reading in readings),
        )

    async def _answers(self, replies: Sequence[asyncio.Future[Any]], is_theirs: bool = False) -> list[Any]:
        """The replies, None for each that Redis refused. A refusal is noted unless it is about somebody else's keys."""
        if not replies:
            return []  # most ticks have nothing to look after
        found = await answered(asyncio.gather(*replies, return_exceptions=True), ANSWER_S)
        for each in found:
            if isinstance(each, StoreRefused):
                self._denied = self._denied if is_theirs else str(each)
            elif isinstance(each, BaseException):
                raise each
        return [None if isinstance(each, StoreRefused) else each for each in found]


def _log_changes(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Log each condition once when it begins and once when it is over."""
    for condition, problem in now.items():
        if condition not in before:
            _log.warning("store trouble", condition=condition, problem=problem)
    for condition in before.keys() - now.keys():
        _log.info("store trouble over", condition=condition)
