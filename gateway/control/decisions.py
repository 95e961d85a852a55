"""The records of requests as they end, on all gateways, for everybody who watches.

Records go through one stream in the store, `kvgate:decisions`. It exists only while somebody watches: a gateway with
viewers makes it and renews it, and without them it expires. Each gateway looks once a second whether it is there, and
sends records only then, all of a quarter of a second in one entry. What is too much is left out and counted. So
watching costs the store a few small commands a second, however many watch and whatever the load.

A record is that of the access log (relay/request_record.py). It has no prompt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from coordinator.errors import StoreError
from coordinator.keys import decisions_key
from coordinator.store import Store
from gateway.errors import ApiError

FLUSH_S, LOOK_S = 0.25, 1.0
AT_ONCE = 25
"""Records that a gateway sends in one entry; more are dropped and counted."""
_ENTRIES, _LIVES_S = 256, 5
_MOST_VIEWERS, _BEHIND, _RECENT = 32, 2000, 100
_COMMENT_S = 10.0

Record = dict[str, Any]


@dataclass(eq=False)
class Viewer:
    """Somebody who watches: gets the records that have the wanted values in the named fields."""

    wanted: Mapping[str, str]
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=_BEHIND))
    dropped: int = 0
    """Records that were left out since they were last taken: by a gateway, or because this one does not keep up."""
    trouble: str = ""
    """Why nothing comes; empty while all is well."""
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> tuple[list[Record], int]:
        """What has come since the last call, and how many were dropped."""
        self.has_news.clear()
        taken, dropped = list(self.records), self.dropped
        self.records.clear()
        self.dropped = 0
        return taken, dropped

    def put(self, record: Record) -> None:
        if any(str(record.get(name)) != value for name, value in self.wanted.items()):
            return
        self.dropped += len(self.records) == _BEHIND
        self.records.append(record)
        self.has_news.set()


class Decisions:
    """One gateway's side of the stream. `run()` is a background task."""

    def __init__(
        self,
        store: Store,
        gateway: str,
        namespace: str,
        sinks: list[Callable[[Record], None]],
        on_watch: Callable[[bool], None],
    ) -> None:
        """While somebody watches, anywhere, `sinks` has a function that takes the records of this gateway. `on_watch`
        is told when that begins and ends."""
        self._store, self._gateway, self._key = store, gateway, decisions_key(namespace)
        self._sinks, self._on_watch = sinks, on_watch
        self._waiting: list[Record] = []
        self._dropped = 0
        self._viewers: set[Viewer] = set()
        self._recent: deque[Record] = deque(maxlen=_RECENT)
        self._last = ""
        """The last entry that was read; empty while nobody watches here."""
        self._is_watched = False

    def __repr__(self) -> str:
        return f"<Decisions {len(self._viewers)} viewers here, {'' if self._is_watched else 'not '}watched>"

    def refuse_too_many(self) -> None:
        """Raises ApiError if no more may watch here."""
        if len(self._viewers) >= _MOST_VIEWERS:
            message = "Too many watch the decisions on this gateway already; use another one."
            raise ApiError(429, "too_many_watch", message, headers={"retry-after": "5"})

    def recent(self) -> list[Record]:
        """The last records that came while somebody watched here, the oldest first."""
        return list(self._recent)

    @contextmanager
    def watching(self, wanted: Mapping[str, str]) -> Iterator[Viewer]:
        """Inside the context, the viewer gets records."""
        viewer = Viewer(wanted)
        self._viewers.add(viewer)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    async def run(self) -> None:
        """Send and read until cancelled."""
        loop, look_at_s = asyncio.get_running_loop(), 0.0
        while True:
            try:
                looks = loop.time() >= look_at_s
                if looks:
                    look_at_s = loop.time() + LOOK_S
                    await self._look()
                if self._is_watched:
                    await self._send()
                if self._last:
                    await self._read()
                if looks or self._is_watched or self._last:  # the store has answered
                    self._tell("")
            except StoreError as error:
                self._tell(str(error))
            await asyncio.sleep(FLUSH_S)

    def _tell(self, trouble: str) -> None:
        for viewer in self._viewers:
            if viewer.trouble != trouble:
                viewer.trouble = trouble
                viewer.has_news.set()

    async def _look(self) -> None:
        """Find out whether anybody watches. With viewers here, see to it that the stream is there. Who begins to watch
        gets what comes from then on."""
        look = ("EXPIRE", self._key, _LIVES_S) if self._viewers else ("EXISTS", self._key)
        is_there = await self._store.ask(*look) == 1
        if self._viewers and (not is_there or not self._last):
            self._last = (await self._store.ask("XADD", self._key, "*", "g", self._gateway)).decode()
            await self._store.ask("EXPIRE", self._key, _LIVES_S)
            is_there = True
        elif not self._viewers:
            self._last = ""
        if is_there != self._is_watched:
            self._is_watched = is_there
            self._waiting.clear()
            (self._sinks.append if is_there else self._sinks.remove)(self._note)
            self._on_watch(is_there)

    def _note(self, record: Record) -> None:
        if len(self._waiting) < AT_ONCE:
            self._waiting.append(record)
        else:
            self._dropped += 1

    async def _send(self) -> None:
        if not self._waiting and not self._dropped:
            return
        records, dropped = self._waiting, self._dropped
        self._waiting, self._dropped = [], 0
        text = orjson.dumps(records)
        # Not if it has expired: then nobody watches any more.
        limits = ("NOMKSTREAM", "MAXLEN", "~", _ENTRIES)
        await self._store.ask("XADD", self._key, *limits, "*", "g", self._gateway, "r", text, "d", dropped)

    async def _read(self) -> None:
        """Hand new entries to the viewers."""
        reply = await self._store.ask("XREAD", "COUNT", _ENTRIES, "STREAMS", self._key, self._last)
        for entry, fields in reply[0][1] if reply else ():
            self._last = entry.decode()
            records, dropped = _parsed(dict(zip(fields[::2], fields[1::2], strict=False)))
            self._recent.extend(records)
            for viewer in self._viewers:
                viewer.dropped += dropped
                for record in records:
                    viewer.put(record)


async def told(decisions: Decisions, wanted: Mapping[str, str], is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    """What somebody who watches gets, as server-sent events, until `is_over`: a record each; `dropped` with how many
    were left out; `trouble` with why nothing comes. A comment goes first, and whenever nothing came for a while."""
    trouble, quiet_s = "", _COMMENT_S
    with decisions.watching(wanted) as viewer:
        while not is_over():
            if quiet_s >= _COMMENT_S:
                quiet_s = 0.0
                yield b": watching\n\n"
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await viewer.has_news.wait()
            records, dropped = viewer.take()
            events = [b"data: %b\n\n" % orjson.dumps(record) for record in records]
            if dropped:
                events.append(b"event: dropped\ndata: %d\n\n" % dropped)
            if viewer.trouble != trouble:
                trouble = viewer.trouble
                events.append(b"event: trouble\ndata: %b\n\n" % orjson.dumps(trouble))
            quiet_s = 0.0 if events else quiet_s + LOOK_S
            if events:
                yield b"".join(events)


def _parsed(fields: dict[bytes, bytes]) -> tuple[list[Record], int]:
    """The records of an entry, and how many its gateway dropped; nothing if no gateway wrote it."""
    try:
        records = orjson.loads(fields.get(b"r", b"[]"))
        dropped = int(fields.get(b"d", b"0"))
    except ValueError:
        return [], 0
    if not isinstance(records, list):
        return [], 0
    return [record for record in records if isinstance(record, dict)], max(0, dropped)
