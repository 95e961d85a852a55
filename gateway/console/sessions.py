"""Who may see the console: whoever has shown an admin key, for half a day. Without API keys it is open.

A session is a signed cookie with the name of the key. The secret of the signatures is in the store, so each gateway
knows the sessions of all others. A gateway keeps the secret that it has read. So another secret in the store ends no
session there until the gateway restarts. A session also ends when no admin key has that name any more.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

from coordinator.errors import StoreDown, StoreError
from coordinator.keys import console_secret_key
from coordinator.store import Store
from gateway.control.operations import store_away
from gateway.errors import ApiError
from gateway.request.keyring import Caller, Keyring

COOKIE = "kvgate_console"
LASTS_S = 12 * 3600
_LONGEST = 1000
_LEARNS_S = 1.0
"""How often a cookie with a wrong signature makes this gateway read the secret again."""


class Sessions:
    """One gateway's side of them."""

    def __init__(self, keyring: Keyring, store: Store, namespace: str) -> None:
        self._keyring, self._store, self._key = keyring, store, console_secret_key(namespace)
        self._secret = b""
        self._learned_s = 0.0

    def __repr__(self) -> str:
        return f"<Sessions, {'open' if self._keyring.is_open else 'for admin keys'}>"

    async def begin(self, key: str) -> str:
        """The cookie's value for somebody who shows this API key. Raises ApiError if it is no admin key."""
        caller = self._keyring.identify({"x-api-key": key})
        if not caller.is_admin:
            raise ApiError(403, "admin_key_required", "The console needs an admin key; this one has `admin: false`.")
        await self._learn()
        told = f"{caller.key.encode().hex()}.{int(time.time()) + LASTS_S}"
        return f"{told}.{self._signed(told)}"

    async def caller(self, cookie: str) -> Caller | None:
        """Whose session this is; None if there is none, or it is over."""
        if self._keyring.is_open:
            return self._keyring.identify({})
        told, _, signature = cookie.rpartition(".")
        name, _, until = told.partition(".")
        if not (cookie.isascii() and len(cookie) <= _LONGEST and until.isdecimal() and int(until) > time.time()):
            return None
        if not self._is_signed(told, signature):
            if self._secret and time.monotonic() < self._learned_s + _LEARNS_S:
                return None
            await self._learn()  # the store was emptied since, and another gateway has made a new one
            if not self._is_signed(told, signature):
                return None
        try:
            return self._keyring.admin(bytes.fromhex(name).decode())
        except ValueError:
            return None

    def token(self, cookie: str) -> str:
        """What a page of this session sends with each action, and a page of another origin does not know."""
        return self._signed(f"csrf {cookie}") if self._secret else ""

    def is_token(self, cookie: str, token: str) -> bool:
        """Whether it is that one. Without API keys there is none: then anybody may call the API, too."""
        return self._keyring.is_open or (token.isascii() and self._is_signed(f"csrf {cookie}", token))

    def _is_signed(self, text: str, signature: str) -> bool:
        return bool(self._secret) and hmac.compare_digest(self._signed(text), signature)

    def _signed(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    async def _learn(self) -> None:
        try:
            await self._store.ask("SETNX", self._key, secrets.token_hex(32))
            self._secret = bytes(await self._store.ask("GET", self._key) or b"")
            self._learned_s = time.monotonic()
            if not self._secret:
                raise StoreDown("the secret was deleted just now")
        except StoreError as error:
            raise store_away(error) from None
