"""Which API keys of the configuration files count while gateways have different files: those of the newest file, at
all gateways.

They are one record. It has the keys of the file, and the names of the files that counted before. A name is a digest of
the keys, so equal files have one name. The keys of a gateway's own file count from now on

- if no gateway has used this file before: it is new, and this gateway has read it first,
- if this gateway had the newest file, and has read another one while it runs: somebody has taken a change back,
- if no gateway has used the newest file for a minute: somebody has gone back by restarting all.

So a gateway that starts again with an old file changes nothing. All gateways change to other keys at the same moment, a
second after the first one has read them: no key is valid at some gateways only. Without `records_secret`, and until a
gateway has read the store, the keys of its own file count.

A file of 10 000 keys is worked on in steps of some 30 ms, and requests run in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import orjson
import structlog
from pydantic import TypeAdapter, ValidationError

from coordinator.errors import StoreError
from coordinator.records import AuditNote
from gateway.records.record import Record, Signer
from gateway.records.record_book import ChangedMeanwhileError, RecordBook
from gateway.settings.gateway_settings import ApiKey
from gateway.settings.queue_settings import AccountLimitSettings

_log = structlog.get_logger("kvgate.records")

FIELD = "file/keys"
_USED = "file/used"
"""A record that changes while a gateway uses the newest file."""
_TOGETHER_MS = 1000
"""Within this time all gateways know of a change."""
_LOOK_S, _SAY_S, _UNUSED_S = 5.0, 20.0, 60.0
"""How often to look; how often a gateway says that it uses the newest file; when nobody does."""
_MOST_BEFORE = 100
_PIECE = 1000
"""So many keys are read in one go: some ms."""
_FACTS = {"name", "before", "from_ms", "keys"}
_KEYS = TypeAdapter(list[ApiKey])
_FIELDS, _LIMITS = ApiKey.model_fields.keys(), AccountLimitSettings.model_fields.keys()


class FileKeys:
    """One gateway's side. Run `run` as a task."""

    def __init__(self, book: RecordBook) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when other keys count."""
        self._book = book
        self._said: list[dict[str, Any]] = []
        """What the own file says of each key. A field that a later version adds changes nothing until it is used."""
        self._names: list[str] = []
        """Of the own file: under each secret."""
        self._newest: Record | None = None
        self.counts: Record | None = None
        """None: the own file counts, because no other is known."""
        self._read: tuple[Record | None, list[ApiKey]] = None, []
        """A record, and its keys."""
        self._heard_s, self._heard = time.monotonic(), (b"", b"")
        book.on_change.append(self._look)

    @property
    def others(self) -> list[ApiKey] | None:
        """The keys that count, with digests instead of hashes; None if they are those of the own file."""
        if self.counts is None or self._is_own(self.counts):
            return None
        if self._read[0] is not self.counts:
            self._read = self.counts, _read(self.counts.facts["keys"])
        return self._read[1]

    @property
    def is_older(self) -> bool:
        """Whether another file than this gateway's is the newest."""
        return self._newest is not None and not self._is_own(self._newest)

    def use(self, keys: Sequence[ApiKey]) -> None:
        """This gateway's file has these keys now."""
        had_newest = self._newest is not None and self._is_own(self._newest)
        signer = self._book.signer
        if signer is not None:
            self._said = _KEYS.dump_python(list(keys), exclude_defaults=True)
            text = orjson.dumps(sorted(self._said, key=lambda key: str(key["name"])))
            self._names = [digest.hex()[:16] for digest in signer.digests(text)]
            if self._book.has_read:
                asyncio.get_running_loop().call_soon(self._decide, had_newest)

    def _decide(self, goes_back: bool = False) -> None:
        """Let the own file's keys count, if they have to."""
        if not self._book.has_read or not self._names:
            return
        newest = self._newest
        is_new = newest is None or not {newest.facts["name"], *newest.facts["before"]}.intersection(self._names)
        if is_new or (goes_back and self.is_older):
            self._announce()

    def _keep_name(self) -> None:
        """If the own file is known as one of before by its name under the other secret only, tell its name under this
        one: else it would be a new file when the other secret is given up."""
        newest, signer = self._newest, self._book.signer
        if newest is None or signer is None or not self.is_older:
            return
        name, *others = self._names or [""]
        before = newest.facts["before"]
        if name not in before and not set(before).isdisjoint(others):
            facts = {**newest.facts, "before": [name, *before][:_MOST_BEFORE]}
            self._book.announce(signer.write(FIELD, newest.version + 1, facts))

    async def run(self) -> None:
        """Until cancelled."""
        has_begun = False
        while self._book.signer is not None:
            try:
                await self._book.refresh()
            except StoreError:
                self._heard_s = time.monotonic()  # nobody could say anything
            else:
                self._decide()
                self._keep_name()
                if not has_begun and self._newest is not None and self._newest.facts["name"] in self._names[1:]:
                    self._announce()  # with digests under the new secret: the other one is given up soon
                has_begun = True
                await self._say_or_hear()
            await asyncio.sleep(_LOOK_S)

    async def _say_or_hear(self) -> None:
        """Say that the newest file is used; or find that nobody says so."""
        newest, used = self._newest, self._book.find(_USED)
        if newest is None or self._book.signer is None:
            return
        is_said = used is not None and used.facts.get("name") == newest.facts["name"]
        heard = (newest.text, used.text if used is not None and is_said else b"")
        now_s = time.monotonic()
        if heard != self._heard:
            self._heard_s, self._heard = now_s, heard
        elif self.is_older and now_s > self._heard_s + _UNUSED_S:
            self._announce()
        elif not self.is_older and now_s > self._heard_s + _SAY_S:
            version = used.version + 1 if used is not None else 1
            said = self._book.signer.write(_USED, version, {"name": newest.facts["name"]})
            with suppress(StoreError, ChangedMeanwhileError):
                await self._book.put([said], AuditNote())

    def _announce(self) -> None:
        """The own file is the newest."""
        newest, signer = self._newest, self._book.signer
        assert signer is not None
        before = [newest.facts["name"], *newest.facts["before"]][:_MOST_BEFORE] if newest is not None else []
        facts = {
            "name": self._names[0],
            "before": [name for name in before if name not in self._names],
            "from_ms": int(time.time() * 1000) + _TOGETHER_MS,
            "keys": [_recorded(key, signer) for key in self._said],
        }
        try:
            record = signer.write(FIELD, newest.version + 1 if newest is not None else 1, facts)
        except ValueError:
            _log.error("the keys of the file are too many for a record: they count at this gateway only")
            self._names = []
            return
        self._book.announce(record)

    def _look(self) -> None:
        """Other records are known."""
        newest = self._book.find(FIELD)
        if newest is None or newest is self._newest or not newest.facts.keys() >= _FACTS:
            return
        self._newest = newest
        if self.counts is None:
            self._count(newest)
        else:
            self._prepare(newest, [], 0)

    def _prepare(self, record: Record, keys: list[ApiKey], start: int) -> None:
        """Read the next keys of a record, and let them count in time."""
        loop, told = asyncio.get_running_loop(), record.facts["keys"]
        if start < len(told) and not self._is_own(record):
            keys += _read(told[start : start + _PIECE])
            loop.call_soon(self._prepare, record, keys, start + _PIECE)
            return
        if start >= len(told):
            self._read = record, keys
        ahead_s = record.facts["from_ms"] / 1000 - time.time()
        if ahead_s <= 0:
            self._count(record)
        else:  # the clocks of gateways may differ by more
            loop.call_later(min(ahead_s, _TOGETHER_MS / 1000), self._count, record)

    def _count(self, record: Record) -> None:
        """Each record counts at its own moment, also if a newer one is known already: at all gateways alike."""
        if self.counts is None or record.is_newer_than(self.counts):
            self.counts = record
            _log.info("keys of the newest file count", is_own=self._is_own(record))
            self.on_change()

    def _is_own(self, record: Record) -> bool:
        return record.facts["name"] in self._names


def _recorded(said: dict[str, Any], signer: Signer) -> dict[str, Any]:
    """Without its hash: whoever can only read Redis cannot compare it with keys that they guess."""
    return said | {"sha256": signer.digest(bytes.fromhex(said["sha256"])).hex()}


def _read(keys: list[dict[str, Any]]) -> list[ApiKey]:
    """What a record says of keys. What only a later version knows is left out: a field, or a key that has it."""
    try:
        return _KEYS.validate_python(keys)
    except ValidationError:
        found = []
        for key in keys:
            known = {name: key[name] for name in key.keys() & _FIELDS}
            if "limits" in known:
                known["limits"] = {name: key["limits"][name] for name in key["limits"].keys() & _LIMITS}
            with suppress(ValidationError):
                found.append(ApiKey.model_validate(known))
        return found
