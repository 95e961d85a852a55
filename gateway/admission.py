"""Who is calling, and is there room: API keys and tenants, requests in flight, bytes held in memory."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import ApiError
from gateway.limit_settings import LimitSettings
from gateway.settings import SecuritySettings

_RETRY_AFTER = {"retry-after": "1"}
_CHALLENGE = {"www-authenticate": "Bearer"}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and what it may see."""

    tenant: str | None
    """None where no keys are configured: everybody is the same caller."""
    sees_decisions: bool
    """Whether x-kvgate-* headers and explain are for it: they tell one tenant what another sent."""


class Keyring:
    """The configured API keys; only their SHA-256 is known here."""

    def __init__(self, security: SecuritySettings) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in security.api_keys]
        self._open = Caller(None, True)
        self._expose = security.expose_decisions
        secret = security.cache_salt_secret
        self._secret = secret.get_secret_value().encode() if secret is not None else b""
        self._share_cache = security.share_cache

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """The caller by `Authorization: Bearer` or `x-api-key`. Raises a 401 for a missing or unknown key."""
        if not self._keys:
            return self._open
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not presented:
            message = "Send your API key as `Authorization: Bearer <key>`."
            raise ApiError(401, "missing_api_key", message, headers=_CHALLENGE)
        digest = hashlib.sha256(presented.encode("latin-1", "replace")).digest()
        found = None
        for known, key in self._keys:  # every key is compared, in constant time
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise ApiError(401, "invalid_api_key", "This API key is not known here.", headers=_CHALLENGE)
        return Caller(found.tenant, found.admin or self._expose)

    def cache_salt(self, caller: Caller, client_salt: str | None) -> str | None:
        """The salt the engine gets: one of the tenant's own, so that no tenant can probe another's cache.

        The HMAC's input frames the two names by length; a client's salt still separates within its tenant.
        """
        if caller.tenant is None or self._share_cache:
            return client_salt
        tenant, salt = caller.tenant.encode(), (client_salt or "").encode("utf-8", "surrogatepass")
        message = len(tenant).to_bytes(4, "big") + tenant + salt
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


class Admission:
    """Counts requests in flight and bytes of bodies held, and refuses what exceeds the limits."""

    def __init__(self, limits: LimitSettings) -> None:
        self._limits = limits
        self.in_flight = 0
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<Admission {self.in_flight} in flight, {self.held_bytes} bytes held>"

    def __enter__(self) -> None:
        """Count a request for as long as it runs. Raises a 429 when the gateway is full."""
        if self.in_flight >= self._limits.max_in_flight:
            raise ApiError(
                429,
                "gateway_overloaded",
                f"This gateway has {self.in_flight} requests in flight, its limit. Retry shortly.",
                headers=_RETRY_AFTER,
            )
        self.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1

    def hold(self, count: int, held_so_far: int) -> None:
        """Account for `count` more bytes of one body. Raises a 413 for a body too large, a 429 when all are."""
        self.refuse_larger(held_so_far + count)
        if self.held_bytes + count > self._limits.max_buffered_bytes:
            raise ApiError(
                429,
                "gateway_overloaded",
                "This gateway holds as many bytes of request bodies as it may. Retry shortly.",
                headers={**_RETRY_AFTER, "connection": "close"},
            )
        self.held_bytes += count

    def try_hold(self, count: int) -> bool:
        """Account for `count` more bytes of an answer, where there is room for them."""
        if self.held_bytes + count > self._limits.max_buffered_bytes:
            return False
        self.held_bytes += count
        return True

    def refuse_larger(self, size_bytes: int) -> None:
        """Raises a 413 for a body of this size, received or only announced, if it is too large."""
        if size_bytes > self._limits.max_body_bytes:
            raise ApiError(
                413,
                "request_too_large",
                f"body: larger than this gateway's limit of {self._limits.max_body_bytes} bytes "
                "(limits.max_body_bytes).",
                headers={"connection": "close"},
            )

    def let_go(self, count: int) -> None:
        self.held_bytes -= count
