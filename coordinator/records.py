"""The records of operators in the store: API keys, replicas that were added by hand, and who changed them.

A record is a field of one hash. Its text is signed: what it says, and whether a gateway wrote it, is known in
gateway/records/. A writer tells the text that it has seen there, and nothing is written if there is another one by now.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from coordinator.keys import audit_key, records_key
from coordinator.registry import pairs, readable
from coordinator.store import Store

_MARK = "#"
"""The field that has another text after each change."""
_PIECE = 500
"""So many records are read at once: no read holds up Redis, or this process, for more than some ms."""
_MOST_AUDITED = 10_000


class RecordsState(NamedTuple):
    """What a look tells: if it is the same, most likely the records are the same, too."""

    mark: bytes
    """Another text after each change by a gateway; empty if there is no record."""
    fields: int


class RecordChange(NamedTuple):
    """One record to write."""

    field: str
    seen: bytes
    """The text that the store has now; empty: none."""
    text: bytes
    """Empty: it is removed."""


@dataclass(frozen=True, slots=True)
class AuditNote:
    """What the audit keeps of a change. Without `who` it keeps nothing."""

    who: str = ""
    what: str = ""
    subject: str = ""
    tenant: str = ""
    """Whose it is."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A note of the audit."""

    at_ms: int
    note: AuditNote


class RecordStore:
    """One cluster's records. All methods raise StoreError."""

    def __init__(self, store: Store, namespace: str) -> None:
        self._store = store
        self._key, self._audit_key = records_key(namespace), audit_key(namespace)

    async def look(self) -> RecordsState:
        mark, fields = await asyncio.gather(
            self._store.ask("HGET", self._key, _MARK), self._store.ask("HLEN", self._key)
        )
        return RecordsState(mark or b"", fields)

    async def read(self) -> dict[str, bytes]:
        """The text of each record."""
        fields = [field for field in await self._store.ask("HKEYS", self._key) if field != _MARK.encode()]
        found: dict[str, bytes] = {}
        for start in range(0, len(fields), _PIECE):
            piece = fields[start : start + _PIECE]
            texts: Sequence[bytes | None] = await self._store.ask("HMGET", self._key, *piece)
            found |= {readable(field): text for field, text in zip(piece, texts, strict=True) if text is not None}
        return found

    async def put(self, changes: Iterable[RecordChange], note: AuditNote) -> bool:
        """Write all of them, or none: False if the store has another text of any than was seen."""
        written = await self._store.ask_script(
            "put_records",
            self._key,
            records=self._key,
            audit=self._audit_key,
            mark=secrets.token_hex(8),
            most_audited=_MOST_AUDITED,
            changes=changes,
            **asdict(note),
        )
        return bool(written)

    async def audit(self, most: int) -> list[AuditEntry]:
        """The last changes, newest first."""
        entries = await self._store.ask("XREVRANGE", self._audit_key, "+", "-", "COUNT", most)
        found = []
        for number, fields in entries:
            told, at_ms = pairs(fields), int(readable(number).partition("-")[0])
            note = AuditNote(*(told.get(name, "") for name in ("who", "what", "subject", "tenant")))
            found.append(AuditEntry(at_ms, note))
        return found
