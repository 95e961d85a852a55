"""The records that this gateway knows: those of the store, and those that the store has lost.

Every 0.3 s it looks whether they have changed. It keeps every record that it has seen, and writes back what the store
has lost or has an older text of: so keys survive a Redis that was emptied, and a restored backup undoes no revocation,
as long as one gateway lives. Requests read the memory only. While the store is away, what is known counts on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import structlog

from coordinator.errors import StoreError
from coordinator.records import AuditEntry, AuditNote, RecordChange, RecordsState, RecordStore
from coordinator.store import Store
from gateway.records.record import Record, Signer, UnsignedError

_log = structlog.get_logger("kvgate.records")

_LOOK_S = 0.3
_READ_S = 30.0
"""How often all are read, even if nothing seems to have changed: somebody may write by hand."""
_REPLACE_S = 30.0
"""How often a text that does not count is replaced by a good one: gateways with different secrets must not do nothing
else."""
MOST = 10_000
_MOST_STORED = 2 * MOST
"""Of more fields, none is read: no gateway wrote them."""
_PIECE = 100
"""So many records are worked on in one go: a few ms."""
_NO_NOTE = AuditNote()
_NEVER_S = float("-inf")
_UNSEEN = RecordsState(b"", -1)


class ChangedMeanwhileError(Exception):
    """Another gateway, or another operator, was quicker."""


class RecordBook:
    """Without a signer it knows nothing. Run `run` as a task."""

    def __init__(self, store: Store, signer: Signer | None, namespace: str) -> None:
        self.signer = signer
        self.on_change: list[Callable[[], None]] = []
        """Called when a record is known that was not, or has changed."""
        self.ignored: dict[str, str] = {}
        """The fields of the store that do not count, and why."""
        self.other_signatures: dict[str, bytes] = {}
        """The texts that are signed with the other secret, by field. They are signed anew."""
        self._store = RecordStore(store, namespace)
        self._known: dict[str, Record] = {}
        self._seen, self._read_s = _UNSEEN, _NEVER_S
        self._replaced_s: dict[str, float] = {}
        self._turn = asyncio.Lock()
        self._first, self._is_asked = asyncio.Event(), asyncio.Event()

    def __repr__(self) -> str:
        return f"<RecordBook {len(self._known)} records, {len(self.ignored)} ignored>"

    @property
    def has_read(self) -> bool:
        """Whether it has read the store since this process began, or needs not."""
        return self.signer is None or self._read_s > _NEVER_S

    @property
    def is_full(self) -> bool:
        return len(self._known) >= MOST

    def of_kind(self, kind: str) -> list[Record]:
        """The records of this kind, also those that were removed."""
        return [record for record in self._known.values() if record.kind == kind]

    def find(self, field: str) -> Record | None:
        return self._known.get(field)

    async def refresh(self) -> None:
        """Learn what other gateways have written just now. Raises StoreError."""
        async with self._turn:
            await self._exchange()

    # -- what operators do ---------------------------------------------------------------------------------------

    async def put(self, records: Sequence[Record], note: AuditNote) -> None:
        """Write all of these, or none. Each has the version after the known one. Raises StoreError, or
        ChangedMeanwhileError."""
        async with self._turn:
            before = [self._known.get(record.field) for record in records]
            for record, known in zip(records, before, strict=True):
                if known is not None and record.version != known.version + 1:
                    raise ChangedMeanwhileError  # this was heard of while the turn was waited for
            if not await self._write(map(self._change_to, records), note):
                await self._exchange(is_due=True)  # the store may only have lost them, or their signature is another
                is_same = [self._known.get(record.field) for record in records] == before
                if not (is_same and await self._write(map(self._change_to, records), note)):
                    raise ChangedMeanwhileError
            self._known |= {record.field: record for record in records}
        self._tell()

    async def remove(self, record: Record, note: AuditNote) -> None:
        """Write that a record is removed. Here that counts at once, also if it cannot be written yet: then this raises
        StoreError, and the next exchange writes it."""
        change = self._change_to(record)
        self._known[record.field] = record
        self._tell()
        async with self._turn:
            if not await self._write([change], note):
                self._replaced_s.pop(record.field, None)  # whatever is there, it is replaced now
                await self._exchange(is_due=True)

    def announce(self, record: Record) -> None:
        """Write a record, whatever the store has. Here it counts at once. If another gateway has just written the same
        version, all choose the same one."""
        self._known[record.field] = record
        self._read_s = time.monotonic() - _READ_S
        self._is_asked.set()
        self._tell()

    async def audit(self, most: int) -> list[AuditEntry]:
        """Who has changed what, newest first. Raises StoreError."""
        return await self._store.audit(most)

    # -- the store -----------------------------------------------------------------------------------------------

    async def first_exchange(self) -> None:
        """Wait until the store was asked once, with or without success."""
        await self._first.wait()

    async def run(self) -> None:
        """Keep the records like the store's, until cancelled."""
        while self.signer is not None:
            self._is_asked.clear()
            with suppress(StoreError):
                async with self._turn:
                    await self._exchange()
            self._first.set()
            with suppress(TimeoutError):  # gateways need not look at the same moment
                await asyncio.wait_for(self._is_asked.wait(), _LOOK_S * random.uniform(0.8, 1.2))
        self._first.set()

    def _change_to(self, record: Record) -> RecordChange:
        known = self._known.get(record.field)
        seen = self.other_signatures.get(record.field, known.text if known is not None else b"")
        return RecordChange(record.field, seen, record.text)

    def _tell(self) -> None:
        for tell in self.on_change:
            tell()

    async def _exchange(self, is_due: bool = False) -> None:
        """Raises StoreError."""
        state = await self._store.look()
        if state == self._seen and not is_due and time.monotonic() < self._read_s + _READ_S:
            return
        if state.fields > _MOST_STORED:
            self._ignore({"*": f"there are {state.fields} fields, and no gateway writes more than {_MOST_STORED}"})
            return
        stored = await self._store.read()
        has_news = await self._take(stored)
        self._seen, self._read_s = state, time.monotonic()
        if has_news:
            self._tell()
        await self._write_back(stored)

    async def _take(self, stored: Mapping[str, bytes]) -> bool:
        """Learn what is new. Returns whether anything was."""
        assert self.signer is not None
        ignored, other_signatures, has_news = {}, dict[str, bytes](), False
        for count, (field, text) in enumerate(stored.items(), 1):
            if count % _PIECE == 0:
                await asyncio.sleep(0)
            known = self._known.get(field)
            if known is not None and known.text == text:
                continue
            try:
                found = self.signer.read(field, text)
            except UnsignedError as error:
                ignored[field[:100]] = str(error)
                continue
            if found.text != text:
                other_signatures[field] = text
            if known is None and self.is_full:
                ignored[field] = f"this gateway knows {MOST} others"
            elif known is None or found.is_newer_than(known):
                self._known[field], has_news = found, True
        self._ignore(ignored)
        self.other_signatures = other_signatures
        return has_news

    def _ignore(self, ignored: dict[str, str]) -> None:
        if ignored.keys() != self.ignored.keys() and ignored:
            _log.warning("records ignored", fields=sorted(ignored)[:20], count=len(ignored))
        self.ignored = ignored

    async def _write_back(self, stored: Mapping[str, bytes]) -> None:
        """Write what the store has lost, and remove what nobody needs any more. Raises StoreError."""
        now_ms, changes = time.time() * 1000, list[RecordChange]()
        for field, record in list(self._known.items()):
            text = stored.get(field, b"")
            if record.is_over(now_ms):
                del self._known[field]
                changes += [RecordChange(field, text, b"")] if text else []
            elif text != record.text and self._may_replace(field):
                changes.append(RecordChange(field, text, record.text))
        for start in range(0, len(changes), _PIECE):
            if not await self._write(changes[start : start + _PIECE], _NO_NOTE):
                return  # another gateway does it; the next look tells
        if changes:
            _log.info("records written back", count=len(changes))

    async def _write(self, changes: Iterable[RecordChange], note: AuditNote) -> bool:
        """As RecordStore.put. The next look reads in any case: a store that loses this write at once looks as it did
        before."""
        self._seen = _UNSEEN
        return await self._store.put(changes, note)

    def _may_replace(self, field: str) -> bool:
        if field not in self.ignored and field not in self.other_signatures:
            return True
        now_s = time.monotonic()
        if now_s < self._replaced_s.get(field, _NEVER_S) + _REPLACE_S * random.uniform(1, 2):
            return False
        self._replaced_s[field] = now_s
        return True
