"""Identifies callers by their API keys, and separates their tenants' caches."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import ApiError
from gateway.settings.gateway_settings import ApiKey, SecuritySettings

_CHALLENGE = {"www-authenticate": "Bearer"}


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


class Keyring:
    """The configured API keys. The gateway knows only the SHA-256 of each."""

    def __init__(self, security: SecuritySettings) -> None:
        self.use(security)
        self._anyone = Caller(None, True, is_admin=True)
        secret = security.cache_salt_secret
        self._secret = secret.get_secret_value().encode() if secret is not None else b""
        self._share_cache = security.share_cache

    def use(self, security: SecuritySettings) -> None:
        """Other keys are valid from now on. Requests that run go on."""
        self._expose_decisions = security.expose_decisions
        self._keys = [(bytes.fromhex(key.sha256), key) for key in security.api_keys]

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """The caller that `Authorization: Bearer` or `x-api-key` names. Raises a 401 for a missing or unknown key."""
        if not self._keys:
            return self._anyone
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not presented:
            message = "Send your API key as `Authorization: Bearer <key>`, or as `x-api-key: <key>`."
            raise ApiError(401, "missing_api_key", message, headers=_CHALLENGE)
        digest = hashlib.sha256(presented.encode("latin-1", "replace")).digest()
        found = None
        for known, key in self._keys:  # compares every key in constant time, so that timing reveals nothing
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise ApiError(401, "invalid_api_key", "This API key is not known here.", headers=_CHALLENGE)
        return self._caller(found)

    @property
    def is_open(self) -> bool:
        """Whether no keys are configured: everybody may do everything."""
        return not self._keys

    def knows(self, caller: Caller) -> bool:
        """Whether its key is still valid, and means the same."""
        return caller == self._anyone if self.is_open else any(self._caller(key) == caller for _, key in self._keys)

    def admin(self, name: str) -> Caller | None:
        """The caller with the admin key of this name; None if there is none."""
        for _, key in self._keys:
            if key.name == name and key.admin:
                return self._caller(key)
        return None

    def sha256_of(self, name: str) -> bytes:
        """The SHA-256 of the key of this name; empty if there is none."""
        return next((sha256 for sha256, key in self._keys if key.name == name), b"")

    def _caller(self, key: ApiKey) -> Caller:
        return Caller(key.tenant, key.admin or self._expose_decisions, key.name, key.admin)

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
