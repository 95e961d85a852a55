"""One record of an operator: its text in the store, and its signature. Pure.

    <version> <live|removed> <HMAC> <JSON>

Only gateways have the secret of the HMAC. So whoever else can write to the store can make no record. It covers the
namespace and the field, too, so no record can be put in the place of another one. An old text of the same record is
still signed: gateways prefer the newer one of two, and write it back. A record that was removed stays so, and its id is
never used again: nothing old can bring it back.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Any

import orjson

_FIELD = re.compile(r"[a-z]+/[A-Za-z0-9._-]{1,64}")
_TEXT = re.compile(rb"([1-9][0-9]{0,14}) (live|removed) ([0-9a-f]{64}) (\{.*\})", re.DOTALL)
_MOST_BYTES = {"file": 4 * 2**20}
"""A record of another kind has at most _MOST_OF_OTHERS."""
_MOST_OF_OTHERS = 4096
DAY_MS = 86_400_000


class UnsignedError(ValueError):
    """No gateway with this secret wrote this text in this field. The message says why."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a field of the store says."""

    field: str
    """Its kind and its id, like `key/k-0123456789abcdef`."""
    version: int
    is_removed: bool
    facts: dict[str, Any]
    text: bytes

    @property
    def kind(self) -> str:
        return self.field.partition("/")[0]

    @property
    def id(self) -> str:
        return self.field.partition("/")[2]

    def is_over(self, now_ms: float) -> bool:
        """Whether nobody needs it any more, not even to know that it was removed: it means nothing after its fact
        `kept_until_ms`, and clocks differ by less than a day."""
        until_ms = self.facts.get("kept_until_ms")
        return isinstance(until_ms, int) and now_ms > until_ms + DAY_MS

    def is_newer_than(self, other: Record) -> bool:
        """In a failover, two gateways may write the same version to two stores: then all choose the same one, whichever
        secret they sign with."""
        return self._order() > other._order()

    def _order(self) -> tuple[bool, int, bytes]:
        return self.is_removed, self.version, self.text.split(b" ", 3)[3]


class Signer:
    """Writes and reads the texts of one cluster's records. While its secret is replaced, there is another one: what is
    signed with that counts as well."""

    def __init__(self, secret: str, namespace: str, other_secret: str | None = None) -> None:
        self._secret, self._namespace = secret.encode(), namespace.encode()
        self._secrets = [self._secret, *([other_secret.encode()] if other_secret is not None else [])]

    def write(self, field: str, version: int, facts: dict[str, Any], *, is_removed: bool = False) -> Record:
        """Raises ValueError for one that could not be read again."""
        state, told = b"removed" if is_removed else b"live", orjson.dumps(facts)
        signature = self._signature(self._secret, field, b"%d" % version, state, told)
        return self.read(field, b"%d %b %b %b" % (version, state, signature, told))

    def read(self, field: str, text: bytes) -> Record:
        """The text of a record that is signed with the other secret is one with this signer's. Raises UnsignedError."""
        most = _MOST_BYTES.get(field.partition("/")[0], _MOST_OF_OTHERS)
        found = _TEXT.fullmatch(text) if len(text) <= most else None
        if found is None or not _FIELD.fullmatch(field):
            raise UnsignedError("it has not the form of a record")
        version, state, signature, told = found.groups()
        own, *others = (self._signature(secret, field, version, state, told) for secret in self._secrets)
        if not hmac.compare_digest(signature, own):
            if not any(hmac.compare_digest(signature, other) for other in others):
                raise UnsignedError("its signature is not by the records_secret of this gateway")
            text = text.replace(signature, own, 1)
        return Record(field, int(version), state == b"removed", orjson.loads(told), text)

    def digest(self, told: bytes) -> bytes:
        """Whoever lacks the secret cannot compare it with guesses."""
        return self.digests(told)[0]

    def digests(self, told: bytes) -> list[bytes]:
        """The same, and the one under the other secret."""
        return [hmac.digest(secret, b"kvgate key\n" + told, "sha256") for secret in self._secrets]

    def session_secret(self, stored: bytes) -> bytes:
        """The secret of the console's sessions. The part in the store is not enough to sign one."""
        return hmac.digest(self._secret, b"kvgate console\n" + stored, "sha256")

    def _signature(self, secret: bytes, field: str, version: bytes, state: bytes, told: bytes) -> bytes:
        # No part but the last can have a line break, so no two records have the same lines.
        message = b"\n".join((b"kvgate record", self._namespace, field.encode(), version, state, told))
        return hmac.new(secret, message, hashlib.sha256).hexdigest().encode()
