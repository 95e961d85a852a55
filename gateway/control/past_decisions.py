"""The records of requests that have ended, kept in the store for whoever asks later why a request went where it went.

Each gateway sends the records of its own requests, which have no prompts, together once a second. Any gateway answers
for all. A record is a field `<tenant>/<request id>`, the tenant percent-encoded, and empty without API keys. Clients
can choose ids. The tenant stands in front, so no tenant can write into another one's records, or read them. A record
is JSON, compressed with a dictionary, which makes a fifth of it.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import orjson
import structlog

from coordinator.decision_ring import CALL_BYTES, DecisionRing
from coordinator.errors import StoreError, StoreRefused
from coordinator.store import Store
from coordinator.watch.store_report import read_report
from gateway.control.operations import store_away
from gateway.errors import ApiError
from gateway.metrics.fast_counters import FastCounter
from gateway.request.keyring import Caller, Keyring
from gateway.settings.gateway_settings import DecisionSettings

_log = structlog.get_logger("kvgate.decisions")

FLUSH_S, LOOK_S = 1.0, 10.0
_MOST_WAITING_BYTES = 2**20
_MOST_RECORD_BYTES = 4096
"""Clients choose the names in a record. A larger record is not kept."""
_MOST_TENANTS = 500
"""So many names are looked for at once."""
_SHORT, _SMALL_PART = 0.95, 100
"""From this share of its memory on, Redis is short of it. Then decisions get only a hundredth of it, so that they take
next to nothing from chunks, which fill it as they should."""
_OF_OTHERS = ("gateway", "costs", "passed_over_tokens", "failed")
"""What shows a tenant what others do."""
_WINDOW_BITS, _MEMORY_LEVEL = 12, 6
"""Of zlib: enough for a record, and a seventh of the time that the usual 32 KiB take."""
_DICTIONARY = (
    b'"speed":1.25},{"replica":"r0","active_requests":1,"backlog_tokens":0,"matched_tokens":0,"charged_tokens":0,'
    b'"displaced_tokens":0,"load_tokens":0,"cost":{"time":"2026-11-28T12:00:00.000+00:00","gateway":"gw0","request_id":"'
    b'","method":"POST","path":"/v1/responses/v1/messages/v1/embeddings/v1/completions/v1/chat/completions","status":200,'
    b'"code":null,"over_budget":null,"tenant":null,"key":"","duration_ms":100.0,"first_byte_ms":null,"model":"","served_model":"",'
    b'"placed_as":"","backend":null,"stream":true,"prompt_tokens":1000,"cached_tokens":null,"output_tokens":100,"resumed":[],'
    b'"attempts":1,"replica":"r0","policy":"prefix_kv_aware","why":"rebalanced","why":"partial_hit","why":"cold",'
    b'"why":"hit","state":"degraded","state":"exact","matched_tokens":0,"passed_over_tokens":0,"waited_ms":0.0,"late":null,"hedged":null,"prefill":null,"unpaired":null,"failed":[],'
    b'"costs":null}'
)
"""What most records have. zlib tells a text that was made with another dictionary: no version can read it wrongly."""

Record = dict[str, Any]


class PastDecisions:
    """One gateway's side. `note` takes the records; `run()` is a background task."""

    def __init__(
        self, store: Store, namespace: str, keyring: Keyring, settings: DecisionSettings, not_kept: FastCounter
    ) -> None:
        self._store, self._keyring, self._not_kept = store, keyring, not_kept
        self._ring = DecisionRing(store, namespace)
        self._waiting: list[tuple[str, bytes]] = []
        self._waiting_bytes = 0
        self._most_bytes_now = 0
        self._look_at_s = 0.0
        self.use(settings)

    def __repr__(self) -> str:
        return f"<PastDecisions {len(self._waiting)} waiting, {self._most_bytes_now} bytes>"

    def use(self, settings: DecisionSettings) -> None:
        """Records are kept by these settings from now on."""
        self._max_bytes, self._look_at_s = settings.max_bytes, 0.0

    def note(self, record: Record) -> None:
        """A request is over. If nobody knows whose it is, it is not kept: strangers could push out all others."""
        if not self._max_bytes or (record["tenant"] is None and not self._keyring.is_open):
            return
        text = _packed(record)
        if len(text) > _MOST_RECORD_BYTES or self._waiting_bytes > _MOST_WAITING_BYTES:
            self._not_kept.inc("too_many" if self._waiting_bytes > _MOST_WAITING_BYTES else "too_large")
            return
        self._waiting.append((_name(record["tenant"], record["request_id"]), text))
        self._waiting_bytes += len(text)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self.flush()
            await asyncio.sleep(FLUSH_S)

    async def flush(self) -> None:
        """Send what waits. What the store does not take is lost."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        try:
            if time.monotonic() >= self._look_at_s:
                self._look_at_s = time.monotonic() + LOOK_S
                await self._look()
            while waiting:
                piece = _first_of(waiting)
                await self._ring.keep(dict(waiting[:piece]), self._most_bytes_now)
                del waiting[:piece]
        except StoreError as error:
            is_full = isinstance(error, StoreRefused) and error.is_full
            if waiting:
                self._not_kept.inc("store_full" if is_full else "store_away", by=len(waiting))
            if isinstance(error, StoreRefused) and (is_full or error.is_wrong_type):
                await self._give_back()

    async def _look(self) -> None:
        """How much memory the decisions may take now. If they are turned off, they give it back."""
        self._most_bytes_now = self._max_bytes
        if not self._max_bytes:
            await self._ring.drop()
            return
        report = await read_report(self._store.ask)
        used, most = report.get("used_bytes") or 0, report.get("maxmemory_bytes") or 0
        if most and used >= _SHORT * most:
            self._most_bytes_now = min(self._max_bytes, int(most) // _SMALL_PART)

    async def _give_back(self) -> None:
        """Redis has no memory left: what is kept goes first. Or somebody else wrote there."""
        try:
            await self._ring.drop()
        except StoreError as error:
            _log.warning("could not drop decisions", error=str(error))

    async def find(self, caller: Caller, request_id: str, tenant: str | None = None) -> Record:
        """What is known of this request: of an id, the last one of a tenant. An admin may name the tenant. Raises
        ApiError."""
        if not caller.is_admin and tenant not in (None, caller.tenant):
            raise ApiError(403, "admin_key_required", "tenant: only an admin sees the decisions of other tenants.")
        tenants: Sequence[str | None] = [caller.tenant if tenant is None else tenant]
        if caller.is_admin and tenant is None:
            tenants = list(dict.fromkeys((*tenants, None, *self._keyring.tenants())))
        names = [_name(each, request_id) for each in tenants]
        try:
            texts = [
                text
                for start in range(0, len(names), _MOST_TENANTS)
                for text in await self._ring.find(names[start : start + _MOST_TENANTS])
            ]
        except StoreError as error:
            raise store_away(error) from None
        found = sorted(_unpacked(texts), key=lambda record: str(record.get("time")), reverse=True)
        if not found:
            message = (
                "No decision on a request of this id is kept: it is too long ago, it has only just ended (ask again in "
                "a second), or your tenant sent none."
            )
            raise ApiError(404, "decision_not_found", message, "request_id")
        if not caller.sees_decisions:
            found = [{name: told for name, told in each.items() if name not in _OF_OTHERS} for each in found]
        return {"request_id": request_id, "decisions": found}


def _name(tenant: str | None, request_id: str) -> str:
    return f"{quote(tenant or '', safe='')}/{request_id}"


def _first_of(waiting: Sequence[tuple[str, bytes]]) -> int:
    """How many records one call takes: at least one."""
    size = 0
    for count, (name, text) in enumerate(waiting):
        size += len(name) + len(text)
        if count and size > CALL_BYTES:
            return count
    return len(waiting)


def _packed(record: Record) -> bytes:
    made = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL, zlib.Z_DEFAULT_STRATEGY, _DICTIONARY)
    return made.compress(orjson.dumps(record)) + made.flush()


def _unpacked(texts: Iterable[bytes]) -> list[Record]:
    """The records in these texts. What cannot be read is left out."""
    found: list[Record] = []
    for text in texts:
        try:
            record = orjson.loads(zlib.decompressobj(_WINDOW_BITS, _DICTIONARY).decompress(text, _MOST_JSON_BYTES))
        except (zlib.error, ValueError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


_MOST_JSON_BYTES = 2**20
"""Of one record: somebody may have written there by hand."""
