"""Applies the event streams of replicas to the map: in order, exactly once, under a lease per replica.

Every gateway runs one, on a connection of its own, so that a placement never waits behind it; `kvgate coordinator` runs
nothing else. The cursor of a stream is in Redis and moves in the script that applies an entry: whoever dies between
reading and applying has changed nothing, and the next holder of the lease reads the same entry again.
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
from coordinator.registry import pairs
from coordinator.scripts import load
from coordinator.store import load_scripts
from coordinator.wire import Wire

_log = structlog.get_logger("kvgate.applier")

LEASE_MS = 3000
_LEAD_S = 0.5
_BLOCK_MS = 200
_ENTRIES = 64
_CONNECT_S = 1.0
_ANSWER_S = 3.0
_RETRY_S = 0.5
_LINE = re.compile(r"\+ [0-9a-f]{32} \d+ \d+ [a-z]+ [0-9a-f]{1,16}|- [0-9a-f]{32}|reset|floor \d+")
"""A transition: see lua/publish.lua."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What one entry of a stream did. `lag_ms`: from the engine's event to the map."""

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


class Applier:
    """`run()` as a task. `pools` names the pools to apply for; `observe` is told of every entry applied."""

    def __init__(
        self, url: str, who: str, pools: Callable[[], Iterable[str]], observe: Callable[[Applied], None]
    ) -> None:
        self._url = url
        self._who = who
        self._pools = pools
        self._observe = observe
        self._allow_oom = True
        self._cursors: dict[tuple[str, str], str] = {}
        self._lead_at_s = 0.0

    @property
    def held(self) -> list[tuple[str, str]]:
        """(pool, replica) of the streams that this one applies now."""
        return sorted(self._cursors)

    async def run(self) -> None:
        """Apply until cancelled; then give the leases back."""
        while True:
            try:
                wire = await Wire.open(self._url, _CONNECT_S, lambda _error: None)
            except StoreError:
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                await self._serve(wire)
            except asyncio.CancelledError:
                await self._give_back(wire)
                raise
            except (StoreError, TimeoutError) as error:
                _log.info("store away", reason=str(error) or "no answer")
            except Exception as error:  # a stream that cannot be read must not end the others for good
                _log.error("applying failed", error=type(error).__name__, detail=str(error))
            finally:
                self._cursors.clear()
                await wire.close()
            await asyncio.sleep(_RETRY_S)

    async def _serve(self, wire: Wire) -> None:
        self._allow_oom = await self._answer(load_scripts(wire))
        loop = asyncio.get_running_loop()
        self._lead_at_s = loop.time()
        while True:
            await self._lead_when_due(wire)
            if not self._cursors:
                await asyncio.sleep(max(0.0, self._lead_at_s - loop.time()))
                continue
            for (pool, replica), entries in await self._read(wire):
                await self._lead_when_due(wire)  # many long streams must not cost the leases
                if (pool, replica) in self._cursors:
                    await self._apply(wire, pool, replica, entries)

    async def _lead_when_due(self, wire: Wire) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._lead_at_s:
            self._lead_at_s = now_s + _LEAD_S
            await self._lead(wire)

    async def _lead(self, wire: Wire) -> None:
        """Renew the leases, and take or hand over some: see lua/lead.lua."""
        cursors: dict[tuple[str, str], str] = {}
        for pool in sorted(set(self._pools())):
            flat = await self._answer(self._run_lead(wire, pool, leaving=False))
            for replica, cursor in zip(flat[::2], flat[1::2], strict=True):
                cursors[pool, replica.decode()] = cursor.decode()
        if cursors.keys() != self._cursors.keys():
            _log.info("streams", applied=[replica for _, replica in sorted(cursors)])
        self._cursors = cursors

    def _run_lead(self, wire: Wire, pool: str, *, leaving: bool) -> asyncio.Future[Any]:
        k = PoolKeys(pool)
        keys = (k.leases, k.agents, k.cursors, k.asks)
        return wire.run(load("lead", self._allow_oom), keys, (self._who, LEASE_MS, int(leaving)))

    async def _give_back(self, wire: Wire) -> None:
        try:
            for pool in {pool for pool, _ in self._cursors}:
                async with asyncio.timeout(_CONNECT_S):
                    await self._run_lead(wire, pool, leaving=True)
        except (StoreError, TimeoutError):
            return

    async def _read(self, wire: Wire) -> list[tuple[tuple[str, str], list[_Entry]]]:
        """New entries of the streams held, waiting a moment for the first."""
        pools = sorted({pool for pool, _ in self._cursors})
        found = []
        for pool in pools:  # one read for each: their streams may be on different nodes
            held = [one for one in self.held if one[0] == pool]
            streams = [PoolKeys(pool).events(replica) for _, replica in held]
            after = [self._cursors[one].split(" ")[0] or "0" for one in held]
            block_ms = max(1, _BLOCK_MS // len(pools))
            reply = await self._answer(
                wire.send("XREAD", "COUNT", _ENTRIES, "BLOCK", block_ms, "STREAMS", *streams, *after)
            )
            by_stream = dict(zip(streams, held, strict=True))
            found += [(by_stream[name.decode()], self._readable(wire, name, entries)) for name, entries in reply or ()]
        return found

    def _readable(self, wire: Wire, stream: bytes, entries: Sequence[Any]) -> list[_Entry]:
        """The entries that agents wrote; what somebody else put there is taken out, or nothing behind it were read."""
        found = []
        for stream_id, flat in entries:
            try:
                found.append(_entry(stream_id, flat))
            except (KeyError, ValueError):
                _log.error("an entry that no agent wrote", stream=stream.decode(), entry=stream_id.decode())
                wire.send("XDEL", stream, stream_id)
        return found

    async def _apply(self, wire: Wire, pool: str, replica: str, entries: Sequence[_Entry]) -> None:
        """Apply entries in order, in one write: each expects the cursor that the one before it leaves."""
        cursor, replies = self._cursors[pool, replica], []
        for entry in entries:
            replies.append(wire.run(load("apply", self._allow_oom), *self._call(pool, replica, cursor, entry)))
            cursor = entry.cursor
        for entry, reply in zip(entries, replies, strict=True):
            status, *rest = await self._answer(reply)
            if status == b"ok":
                self._cursors[pool, replica] = entry.cursor
                self._observe(Applied(pool, replica, len(entry.transitions), int(rest[0]), rest[1] == 1))
            elif status == b"moved":
                self._cursors[pool, replica] = rest[0].decode()
                return  # another one has applied them: read on from there
            else:
                del self._cursors[pool, replica]
                return

    def _call(self, pool: str, replica: str, cursor: str, entry: _Entry) -> tuple[list[str], list[str]]:
        k = PoolKeys(pool)
        named = [k.own_prefix + line.split(" ", 2)[1] for line in entry.transitions if line[0] in "+-"]
        keys = [k.leases, k.cursors, k.replicas, k.owned_tokens, k.held(replica), k.asks, *named]
        args = [self._who, replica, cursor, entry.id, entry.number, entry.incarnation, entry.at_ms]
        return keys, [*args, *entry.transitions]

    async def _answer(self, reply: Any) -> Any:
        async with asyncio.timeout(_ANSWER_S):
            return await reply


def _entry(stream_id: bytes, flat: list[bytes]) -> _Entry:
    fields = pairs(flat)
    lines = fields["transitions"].split("\n")
    if not all(_LINE.fullmatch(line) for line in lines) or not (fields["n"].isdigit() and fields["at_ms"].isdigit()):
        raise ValueError(fields["n"])
    return _Entry(stream_id.decode(), fields["n"], fields["inc"], fields["at_ms"], lines)
