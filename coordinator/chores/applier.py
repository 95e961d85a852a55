"""Applies the replicas' event streams to the map: in order, exactly once, under one lease per replica.

Every gateway runs one applier per pool, on a connection of its own, so that a placement never waits behind it; `kvgate
coordinator` runs nothing else. A stream's cursor is in Redis and moves in the script that applies an entry. So a
process that dies between reading and applying has changed nothing, and the next holder of the lease reads the same
entry again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog

from coordinator.errors import StoreError
from coordinator.keys import PoolKeys
from coordinator.redis.address import connect
from coordinator.redis.outage import Outage
from coordinator.redis.time_limit import answered
from coordinator.redis.wire import Wire, load_scripts
from coordinator.registry import pairs, readable
from coordinator.scripts import load

_log = structlog.get_logger("kvgate.applier")

LEASE_MS = 3000
_LEAD_S = 0.5
_BLOCK_MS = 200
_ENTRIES = 64
"""The most of one stream that are read at once."""
_APART_S_A_STREAM, _MAX_APART_S = 0.004, 0.1
"""Two reads are at least so far apart, for each stream that is held: Redis takes several microseconds for each stream,
so a read that finds one entry is dear."""
_TRANSITIONS_AT_ONCE = 2000
"""About this many are applied in one write: some 10 ms of Redis' time. Leases are renewed in between."""
_LOGGED = 8
_CONNECT_S = 1.0
_ANSWER_S = 3.0
_RETRY_S = 0.5
_NUMBER = re.compile(r"[0-9]{1,15}")
_LINE = re.compile(
    r"\+ [0-9a-f]{32} [0-9]{1,15} [0-9]{1,15} [a-z]+ [0-9a-f]{1,16}|- [0-9a-f]{32}|reset|floor (?P<floor>[0-9]{1,15})"
)
"""A transition: see lua/publish.lua."""


@dataclass(frozen=True, slots=True)
class Applied:
    """One entry that was applied. `lag_ms` is the time from the engine's event to the map."""

    pool: str
    replica: str
    transitions: int
    lag_ms: int
    entries_missing: bool


class _Entry(NamedTuple):
    id: str
    number: str
    incarnation: str
    at_ms: str
    transitions: list[str]

    @property
    def cursor(self) -> str:
        return f"{self.id} {self.number}"


_Streams = Sequence[tuple[str, Sequence[_Entry]]]
"""Replicas with entries of their streams, in order."""


class Appliers:
    """An Applier for every pool that `pools` names, now or later. Run `run()` as a task."""

    def __init__(
        self,
        url: str,
        who: str,
        pools: Callable[[], Iterable[str]],
        observe: Callable[[Applied], None],
        namespace: str = "",
    ) -> None:
        self._url = url
        self._who = who
        self._pools = pools
        self._observe = observe
        self._namespace = namespace

    async def run(self) -> None:
        """Apply until cancelled."""
        begun: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for pool in set(self._pools()) - begun:
                    begun.add(pool)
                    applier = Applier(self._url, self._who, pool, self._observe, self._namespace)
                    tasks.create_task(applier.run())
                await asyncio.sleep(_LEAD_S)


class Applier:
    """Applies its share of a pool's streams and calls `observe` for every entry. Run `run()` as a task."""

    def __init__(self, url: str, who: str, pool: str, observe: Callable[[Applied], None], namespace: str = "") -> None:
        self._url = url
        self._who = who
        self._pool = pool
        self._keys = PoolKeys(pool, namespace)
        self._observe = observe
        self._allow_oom = True
        self._cursors: dict[str, str] = {}
        """Replica → the cursor of its stream, for the streams that it holds."""
        self._may_hold_more = True
        """Whether it may have leases that `_cursors` does not have: then the next heartbeat looks for all."""
        self._lead_at_s = 0.0
        self._outage = Outage()

    @property
    def held(self) -> list[str]:
        """The replicas whose streams it applies now."""
        return sorted(self._cursors)

    async def run(self) -> None:
        """Apply until cancelled; then give the leases back."""
        while True:
            try:
                wire = await connect(self._url, self._keys.anchor, _CONNECT_S, lambda _error: None)
            except StoreError as error:
                self._failed(error)
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                await self._serve(wire)
            except asyncio.CancelledError:
                await self._give_back(wire)
                raise
            except StoreError as error:
                self._failed(error)
            except Exception as error:  # a stream that cannot be read must not stop the others for good
                _log.error("applying failed", pool=self._pool, error=type(error).__name__, detail=str(error))
            finally:
                self._cursors.clear()
                self._may_hold_more = True
                await wire.close()
            await asyncio.sleep(_RETRY_S)

    def _failed(self, error: StoreError) -> None:
        away_s = self._outage.failed(asyncio.get_running_loop().time())
        if away_s is not None:
            _log.warning("store away", pool=self._pool, reason=str(error), away_s=away_s)

    async def _serve(self, wire: Wire) -> None:
        self._allow_oom = await answered(load_scripts(wire), _ANSWER_S)
        loop = asyncio.get_running_loop()
        self._lead_at_s = loop.time()
        lasts_at_s = self._lead_at_s + _LEAD_S
        while True:
            await self._lead_when_due(wire)
            if loop.time() >= lasts_at_s and (away_s := self._outage.ended(loop.time())) is not None:
                _log.info("store back", pool=self._pool, away_s=away_s)
            if not self._cursors:
                await asyncio.sleep(max(0.0, self._lead_at_s - loop.time()))
                continue
            next_read_at_s = loop.time() + min(_APART_S_A_STREAM * len(self._cursors), _MAX_APART_S)
            for streams in _in_parts(await self._read(wire)):
                await self._lead_when_due(wire)  # leases must not lapse behind many long streams
                await self._apply(wire, streams)
            await asyncio.sleep(next_read_at_s - loop.time())

    async def _lead_when_due(self, wire: Wire) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._lead_at_s:
            self._lead_at_s = now_s + _LEAD_S
            await self._lead(wire)

    async def _lead(self, wire: Wire) -> None:
        """Renew the leases, and take or hand over some: see lua/lead.lua."""
        cursors = pairs(await answered(self._run_lead(wire, leaving=False), _ANSWER_S))
        taken, let_go = sorted(cursors.keys() - self._cursors.keys()), sorted(self._cursors.keys() - cursors.keys())
        if taken or let_go:
            changes = {"taken": taken[:_LOGGED], "let_go": let_go[:_LOGGED]}
            _log.info("streams", pool=self._pool, held=len(cursors), **changes)
        self._cursors, self._may_hold_more = cursors, False

    def _run_lead(self, wire: Wire, *, leaving: bool) -> asyncio.Future[Any]:
        script = load("lead", self._allow_oom)
        known = [] if self._may_hold_more else list(self._cursors)
        return wire.run(
            script, script.operands(self._keys, applier=self._who, lease_ms=LEASE_MS, leaving=leaving, known=known)
        )

    async def _give_back(self, wire: Wire) -> None:
        if not self._cursors:
            return
        try:
            await answered(self._run_lead(wire, leaving=True), _CONNECT_S)
        except StoreError:
            return

    async def _read(self, wire: Wire) -> _Streams:
        """New entries of the streams held; waits 200 ms for the first."""
        replica_of = {self._keys.events(replica): replica for replica in self.held}
        after = [cursor.split(" ")[0] or "0" for _, cursor in sorted(self._cursors.items())]
        asked = wire.send("XREAD", "COUNT", _ENTRIES, "BLOCK", _BLOCK_MS, "STREAMS", *replica_of, *after)
        reply = await answered(asked, _ANSWER_S)
        return [(replica_of[readable(name)], self._readable(wire, name, entries)) for name, entries in reply or ()]

    def _readable(self, wire: Wire, stream: bytes, entries: Sequence[Any]) -> list[_Entry]:
        """The entries that agents wrote. Other entries are deleted, as nothing behind them could be read otherwise."""
        found = []
        for stream_id, flat in entries:
            try:
                found.append(_entry(stream_id, flat))
            except (KeyError, ValueError):
                _log.error("an entry that no agent wrote", stream=readable(stream), entry=readable(stream_id))
                wire.send("XDEL", stream, stream_id)
        return found

    async def _apply(self, wire: Wire, streams: _Streams) -> None:
        """Apply these entries in one write. Those of one stream are in order: each expects the cursor that the one
        before it leaves."""
        sent = []
        for replica, entries in streams:
            cursor = self._cursors.get(replica)
            for entry in entries if cursor is not None else ():
                sent.append((replica, entry, self._run_apply(wire, replica, cursor, entry)))
                cursor = entry.cursor
        for replica, entry, reply in sent:
            status, *rest = await answered(reply, _ANSWER_S)
            if replica not in self._cursors:
                continue  # the lease was lost at an earlier entry
            if status == b"ok":
                self._cursors[replica] = entry.cursor
                self._observe(Applied(self._pool, replica, len(entry.transitions), int(rest[0]), rest[1] == 1))
            elif status == b"moved":
                self._cursors[replica] = readable(rest[0])  # another applier has applied it: continue from there
            else:
                del self._cursors[replica]
                self._may_hold_more = True

    def _run_apply(self, wire: Wire, replica: str, cursor: str | None, entry: _Entry) -> asyncio.Future[Any]:
        script = load("apply", self._allow_oom)
        operands = script.operands(
            self._keys,
            applier=self._who,
            replica=replica,
            known_cursor=cursor,
            stream_id=entry.id,
            number=entry.number,
            incarnation=entry.incarnation,
            happened_ms=entry.at_ms,
            keys=[line.split(" ", 2)[1] for line in entry.transitions if line[0] in "+-"],
            transitions=entry.transitions,
        )
        return wire.run(script, operands)


def _in_parts(streams: _Streams) -> Iterator[_Streams]:
    """Streams that together have about _TRANSITIONS_AT_ONCE transitions, or one that has more."""
    part: list[tuple[str, Sequence[_Entry]]] = []
    transitions = 0
    for replica, entries in streams:
        part.append((replica, entries))
        transitions += sum(len(entry.transitions) for entry in entries)
        if transitions >= _TRANSITIONS_AT_ONCE:
            yield part
            part, transitions = [], 0
    if part:
        yield part


def _entry(stream_id: bytes, flat: list[bytes]) -> _Entry:
    fields = pairs(flat)
    if not (_NUMBER.fullmatch(fields["n"]) and _NUMBER.fullmatch(fields["at_ms"])):
        raise ValueError("no number")
    lines = fields["transitions"].split("\n")
    read = [_LINE.fullmatch(line) for line in lines]
    if not all(line is not None and int(line["floor"] or 0) <= int(fields["n"]) for line in read):
        raise ValueError("no transition")
    return _Entry(stream_id.decode(), fields["n"], fields["inc"], fields["at_ms"], lines)
