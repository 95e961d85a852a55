"""The replicas that operators add while the gateways run: signed records in the store (gateway/records/).

A record has a random id of its own, because a removed one never comes back: so a replica can be removed and added again
under the same name.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import NamedTuple

from pydantic import ValidationError

from coordinator.records import AuditNote
from gateway.records.record import DAY_MS, Record
from gateway.records.record_book import RecordBook
from gateway.replicas.discovery.source import SourceDown
from gateway.settings.gateway_settings import ReplicaSettings

ADDED = "added"
"""The name of this source."""
MOST = 1000
_KIND = "replica"
_REMOVED_KEPT_MS = 30 * DAY_MS
"""For so long, a removal is remembered: then a backup with the replica in it could bring the replica back."""


class Added(NamedTuple):
    """A replica that was added."""

    record: Record
    replica: ReplicaSettings


class AddedReplicas:
    """A source of replicas. Without the secret of the records it has none."""

    name = ADDED
    retry_s = 0.3

    def __init__(self, book: RecordBook) -> None:
        self._book = book
        self._changed = asyncio.Event()
        book.on_change.append(self._changed.set)

    async def follow(self) -> AsyncGenerator[list[ReplicaSettings], None]:
        await self._book.first_exchange()
        if not self._book.has_read:
            raise SourceDown("the store was not read yet")
        while True:
            self._changed.clear()
            yield [each.replica for each in self.all()]
            await self._changed.wait()

    def all(self) -> list[Added]:
        """The oldest first: if two gateways have added one id in the same moment, all choose the same one."""
        found = list[tuple[int, str, Added]]()
        for record in self._book.of_kind(_KIND):
            told = {name: record.facts[name] for name in ReplicaSettings.model_fields if name in record.facts}
            with suppress(ValidationError):  # a later version may write what this one does not understand
                if not record.is_removed:
                    since_ms = record.facts.get("since_ms")
                    added = Added(record, ReplicaSettings.model_validate(told))
                    found.append((since_ms if isinstance(since_ms, int) else 0, record.id, added))
        return [added for _, _, added in sorted(found)]

    async def add(self, replica: ReplicaSettings, who: str) -> None:
        """Raises StoreError, ChangedMeanwhileError, or ValueError if that is too long for a record."""
        assert self._book.signer is not None
        facts = replica.model_dump(exclude_defaults=True) | {"since_ms": int(time.time() * 1000), "by": who}
        record = self._book.signer.write(f"{_KIND}/{secrets.token_hex(8)}", 1, facts)
        await self._book.put([record], AuditNote(who, "add replica", f"{replica.id} {replica.url}"))

    async def remove(self, added: Added, who: str) -> None:
        """Here it counts at once. Raises StoreError if the others do not know of it yet."""
        assert self._book.signer is not None
        record, replica = added
        facts = {"id": replica.id, "by": who, "kept_until_ms": int(time.time() * 1000) + _REMOVED_KEPT_MS}
        removed = self._book.signer.write(record.field, record.version + 1, facts, is_removed=True)
        await self._book.remove(removed, AuditNote(who, "remove replica", f"{replica.id} {replica.url}"))
