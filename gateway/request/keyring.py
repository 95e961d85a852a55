"""Identifies callers by their API keys, and separates their tenants' caches.

Keys are found by a digest in a dict, which takes as long with 10 000 keys as with one. This need not take constant
time: the time only depends on the digest, and nobody can make a key whose digest they have chosen.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import ApiError
from gateway.records.file_keys import FileKeys
from gateway.records.key_record import KIND, is_revoked, key_records
from gateway.records.record import Record, Signer
from gateway.records.record_book import RecordBook
from gateway.settings.budget_settings import BudgetSettings
from gateway.settings.gateway_settings import ApiKey, SecuritySettings
from gateway.settings.queue_settings import NO_LIMITS, AccountLimitSettings

_CHALLENGE = {"www-authenticate": "Bearer"}
_STEP_MS = 60_000


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and what it may see."""

    tenant: str | None
    """None if no keys are configured: then all senders are the same caller."""
    sees_decisions: bool
    """Whether it gets the headers of decisions and may use explain. Both show one tenant what another sent."""
    key: str = ""
    """The name of its API key; empty if no keys are configured."""
    is_admin: bool = False
    """Whether it may operate the cluster."""
    manages_keys: bool = False
    """Whether it may make and revoke keys of its tenant."""
    models: frozenset[str] | None = None
    """The models that it may use; None: all."""
    id: str = ""
    """Of its API key: unlike the name, no other key has it."""
    is_recorded: bool = False
    """Whether its key was made while gateways ran: its tenant may have made any number of these."""
    limits: AccountLimitSettings = NO_LIMITS
    """Those of its API key."""
    budgets: tuple[BudgetSettings, ...] = ()
    """Those of its API key."""
    account: str = ""
    """Under which id its use is counted: the keys of a rotation share one."""

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class _Key:
    caller: Caller
    digest: bytes
    expires_ms: float = math.inf


class ExpiryClock:
    """The time by which keys expire. A small step back of the clock makes no key valid again. After a large step back,
    the clock counts as it is."""

    def __init__(self) -> None:
        self._latest_ms = 0.0

    def now_ms(self) -> float:
        now_ms = time.time() * 1000
        if not now_ms < self._latest_ms <= now_ms + _STEP_MS:
            self._latest_ms = now_ms
        return self._latest_ms


class Keyring:
    """The API keys: those of the newest configuration file, and those that were made while gateways ran. The gateway
    knows only a digest of each."""

    def __init__(
        self, security: SecuritySettings, records: RecordBook | None = None, files: FileKeys | None = None
    ) -> None:
        self._records, self._files = records, files
        self._read: list[Record] = []
        self._recorded: dict[bytes, _Key] = {}
        self._by_id: dict[str, _Key] = {}
        self._counts: Record | None = None
        """The record of files' keys that was read."""
        self._expose_decisions = security.expose_decisions
        self.clock = ExpiryClock()
        self._anyone = Caller(None, True, is_admin=True)
        secret = security.cache_salt_secret
        self._secret = secret.get_secret_value().encode() if secret is not None else b""
        self._share_cache = security.share_cache
        self.use(security)
        if records is not None:
            records.on_change.append(self._records_changed)
        if files is not None:
            files.on_change = self._read_files

    def use(self, security: SecuritySettings) -> None:
        """Other keys are configured from now on. Requests that run go on."""
        counts = self._files.counts if self._files is not None else None
        is_same = counts is not None and counts is self._counts and security.expose_decisions == self._expose_decisions
        self._expose_decisions = security.expose_decisions
        self._own = security.api_keys
        if self._files is not None:
            self._files.use(security.api_keys)
        self._read_records()
        if is_same:  # and this file's, if they are others, a second later
            self._index()
        else:
            self._read_files()

    def _records_changed(self) -> None:
        if self._records is not None and self._records.of_kind(KIND) != self._read:
            self._read_records()
            self._index()

    def _read_records(self) -> None:
        """The keys that were made, and not revoked."""
        if self._records is None:
            return
        self._read = self._records.of_kind(KIND)
        keys = key_records(self._read)
        self._recorded = {}
        for key in keys.values():
            if not is_revoked(key, keys):
                models = None if key.models is None else frozenset(key.models)
                sees = key.admin or self._expose_decisions
                rights = key.admin, key.manages_keys, models
                caller = Caller(
                    key.tenant, sees, key.name, *rights, key.id, True, key.limits, key.budgets, key.account or key.id
                )
                digest = bytes.fromhex(key.digest)
                self._recorded[digest] = _Key(caller, digest, key.expires_ms)

    def _read_files(self) -> None:
        """The keys of the newest configuration file: by their SHA-256 if it is this gateway's, else by the signer's
        digest of that."""
        self._others, self._counts = (self._files.others, self._files.counts) if self._files else (None, None)
        found = map(self._configured_key, self._own if self._others is None else self._others)
        self._configured = {key.digest: key for key in found}
        self._index()

    def _index(self) -> None:
        self._by_id = {key.caller.id: key for key in (*self._recorded.values(), *self._configured.values())}

    def _configured_key(self, key: ApiKey) -> _Key:
        models = None if key.models is None else frozenset(key.models)
        rights = key.admin, key.manages_keys, models
        sees, limits, budgets = key.admin or self._expose_decisions, key.limits, tuple(key.budgets)
        caller = Caller(key.tenant, sees, key.name, *rights, key.name, False, limits, budgets, key.name)
        return _Key(caller, bytes.fromhex(key.sha256))

    @property
    def _signer(self) -> Signer | None:
        return self._records.signer if self._records is not None else None

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """The caller that `Authorization: Bearer` or `x-api-key` names. Raises a 401 for a missing or unknown key, a
        503 while this gateway does not know yet which keys were made."""
        if not self._own:
            return self._anyone
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not presented:
            message = "Send your API key as `Authorization: Bearer <key>`, or as `x-api-key: <key>`."
            raise ApiError(401, "missing_api_key", message, headers=_CHALLENGE)
        key = self._find(presented.encode("latin-1", "replace"))
        if key is None:
            if self._records is not None and not self._records.has_read:
                message = "This gateway has not reached Redis yet, and does not know all API keys."
                raise ApiError(503, "keys_unknown", message, headers={"retry-after": "1"})
            raise ApiError(401, "invalid_api_key", "This API key is not known here.", headers=_CHALLENGE)
        if not self._is_valid(key):
            raise ApiError(401, "invalid_api_key", "This API key has expired.", headers=_CHALLENGE)
        return key.caller

    def _find(self, presented: bytes) -> _Key | None:
        sha256 = hashlib.sha256(presented).digest()
        key = self._recorded.get(sha256)
        if key is not None or self._others is None or self._signer is None:
            return key or self._configured.get(sha256)
        found = map(self._configured.get, self._signer.digests(sha256))
        return next(filter(None, found), None)

    def _is_valid(self, key: _Key) -> bool:
        return key.expires_ms == math.inf or self.clock.now_ms() < key.expires_ms

    @property
    def is_open(self) -> bool:
        """Whether no keys are configured: everybody may do everything. What is in Redis never opens a gateway."""
        return not self._own

    def knows(self, caller: Caller) -> bool:
        """Whether its key is still valid, and means the same."""
        if self.is_open:
            return caller == self._anyone
        key = self._by_id.get(caller.id)
        return key is not None and key.caller == caller and self._is_valid(key)

    def refuse_revoked(self, caller: Caller) -> None:
        """Raises a 401 if a caller that was identified before would not be now."""
        key = self._by_id.get(caller.id)
        if not self.is_open and (key is None or not self._is_valid(key)):
            message = "This API key was revoked, or has expired, while the request waited."
            raise ApiError(401, "invalid_api_key", message, headers=_CHALLENGE)

    def admin(self, key_id: str) -> Caller | None:
        """The caller with the admin key of this id; None if there is none."""
        key = self._by_id.get(key_id)
        return key.caller if key is not None and key.caller.is_admin and self._is_valid(key) else None

    def tenants(self) -> set[str | None]:
        """Those that have a key."""
        return {key.caller.tenant for key in self._by_id.values()}

    def digest_of(self, key_id: str) -> bytes:
        """Differs for another key of this id, and is the same at all gateways; empty if there is none."""
        key = self._by_id.get(key_id)
        if key is None:
            return b""
        is_own = self._others is None and not key.caller.is_recorded
        return self._signer.digest(key.digest) if is_own and self._signer is not None else key.digest

    def expires_ms(self, caller: Caller) -> float:
        """When the caller's key expires."""
        key = self._by_id.get(caller.id)
        return key.expires_ms if key is not None else 0.0

    def callers(self) -> list[Caller]:
        """The callers with all valid keys."""
        return [key.caller for key in self._by_id.values() if self._is_valid(key)]

    def configured(self) -> list[Caller]:
        """The callers with the keys of the newest configuration file."""
        return [key.caller for key in self._configured.values()]

    def cache_salt(self, caller: Caller, client_salt: str | None) -> str | None:
        """The cache salt for the engine. Each tenant has its own, so that no tenant can probe another's cache.

        A client's salt still separates caches within its tenant. The HMAC's input begins with the length of the
        tenant's name, so that no two pairs of tenant and salt give the same input.
        """
        if caller.tenant is None or self._share_cache:
            return client_salt
        tenant, salt = caller.tenant.encode(), (client_salt or "").encode("utf-8", "surrogatepass")
        message = len(tenant).to_bytes(4, "big") + tenant + salt
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()
