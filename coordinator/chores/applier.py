"""Applies the replicas' event streams to the map: in order, exactly once, under one lease per replica.

Every gateway runs one applier per pool, on a connection of its own, so that a placement never waits behind it; `kvgate
coordinator` runs nothing else. A stream's cursor is in Redis and moves in the script that applies an entry. So a
process that dies between reading and applying has changed nothing, and the next holder of the lease reads the same
entry again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
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
            for replica, entries in await self._read(wire):
                await self._lead_when_due(wire)  # leases must not lapse behind many long streams
                if replica in self._cursors:
                    await self._apply(wire, replica, entries)

    async def _lead_when_due(self, wire: Wire) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._lead_at_s:
            self._lead_at_s = now_s + _LEAD_S
            await self._lead(wire)

    async def _lead(self, wire: Wire) -> None:
        """Renew the leases, and take or hand over some: see lua/lead.lua."""
        flat = await answered(self._run_lead(wire, leaving=False), _ANSWER_S)
        cursors = pairs(flat)
        if cursors.keys() != self._cursors.keys():
            _log.info("streams", pool=self._pool, applied=sorted(cursors))
        self._cursors = cursors

    def _run_lead(self, wire: Wire, *, leaving: bool) -> asyncio.Future[Any]:
        script = load("lead", self._allow_oom)
        return wire.run(script, script.operands(self._keys, applier=self._who, lease_ms=LEASE_MS, leaving=leaving))

    async def _give_back(self, wire: Wire) -> None:
        if not self._cursors:
            return
        try:
            await answered(self._run_lead(wire, leaving=True), _CONNECT_S)
        except StoreError:
            return

    async def _read(self, wire: Wire) -> list[tuple[str, list[_Entry]]]:
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

    async def _apply(self, wire: Wire, replica: str, entries: Sequence[_Entry]) -> None:
        """Apply entries in order, in one write: each expects the cursor that the one before it leaves."""
        cursor, replies = self._cursors[replica], []
        for entry in entries:
            replies.append(self._run_apply(wire, replica, cursor, entry))
            cursor = entry.cursor
        for entry, reply in zip(entries, replies, strict=True):
            status, *rest = await answered(reply, _ANSWER_S)
            if status == b"ok":
                self._cursors[replica] = entry.cursor
                self._observe(Applied(self._pool, replica, len(entry.transitions), int(rest[0]), rest[1] == 1))
            elif status == b"moved":
                self._cursors[replica] = readable(rest[0])
                return  # another applier has applied them: continue from there
            else:
                del self._cursors[replica]
                return

    def _run_apply(self, wire: Wire, replica: str, cursor: str, entry: _Entry) -> asyncio.Future[Any]:
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


def _entry(stream_id: bytes, flat: list[bytes]) -> _Entry:
    fields = pairs(flat)
    if not (_NUMBER.fullmatch(fields["n"]) and _NUMBER.fullmatch(fields["at_ms"])):
        raise ValueError("no number")
    lines = fields["transitions"].split("\n")
    read = [_LINE.fullmatch(line) for line in lines]
    if not all(line is not None and int(line["floor"] or 0) <= int(fields["n"]) for line in read):
        raise ValueError("no transition")
    return _Entry(stream_id.decode(), fields["n"], fields["inc"], fields["at_ms"], lines)
