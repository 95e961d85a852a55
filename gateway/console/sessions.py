"""Who may see the console: whoever has shown an admin key, for half a day. Without API keys it is open.

A session is a signed cookie with the id of the key. The secret of the signatures is in the store, so each gateway
knows the sessions of all others. Each reads it again every 10 s: if it is deleted from the store, all sessions end.
If there is a `security.records_secret`, it is a part of the secret: then reading the store is not enough to sign.
What is signed has the key's hash in it, too. So a session ends when its key is no admin key any more, or is another.
A session whose user has logged out is written down in the store, until it would have ended by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time

from coordinator.errors import StoreDown, StoreError
from coordinator.keys import console_secret_key
from coordinator.store import Store
from gateway.control.operations import store_away
from gateway.errors import ApiError
from gateway.records.record import Signer
from gateway.request.keyring import Caller, Keyring

COOKIE = "kvgate_console"
LASTS_S = 12 * 3600
_LONGEST = 1000
_GOOD_S, _DOUBTED_S = 10.0, 1.0
"""How long a secret that was read is good: less long if a cookie's signature is not by it."""


class Sessions:
    """One gateway's side of them."""

    def __init__(self, keyring: Keyring, store: Store, namespace: str, signer: Signer | None = None) -> None:
        self._keyring, self._store, self._key = keyring, store, console_secret_key(namespace)
        self._signer = signer
        self._secret = b""
        self._problem: StoreError = StoreDown("the secret of the sessions was not read")
        self._asked_s = float("-inf")
        self._asking = asyncio.Lock()

    async def begin(self, key: str) -> str:
        """The cookie's value for somebody who shows this API key. Raises ApiError if it is no admin key."""
        caller = self._keyring.identify({"x-api-key": key})
        if not caller.is_admin:
            raise ApiError(403, "admin_key_required", "The console needs an admin key; this one has `admin: false`.")
        await self._learn(good_s=0)
        told = f"{caller.id.encode().hex()}.{int(time.time()) + LASTS_S}.{secrets.token_hex(8)}"
        return f"{told}.{self._signed(told, caller.id)}"

    async def caller(self, cookie: str) -> Caller | None:
        """Whose session this is; None if there is none, or it is over. Raises ApiError if the secret is not known, and
        cannot be read."""
        if self._keyring.is_open:
            return self._keyring.identify({})
        told, _, signature = cookie.rpartition(".")
        name, _, rest = told.partition(".")
        until = rest.partition(".")[0]
        if not (cookie.isascii() and len(cookie) <= _LONGEST and until.isdecimal() and int(until) > time.time()):
            return None
        try:
            key = bytes.fromhex(name).decode()
        except ValueError:
            return None
        await self._learn(_GOOD_S)
        if not self._is_signed(told, key, signature):
            await self._learn(_DOUBTED_S)  # the store was emptied since, and another gateway has made a new one
            if not self._is_signed(told, key, signature):
                return None
        return None if await self._has_ended(cookie) else self._keyring.admin(key)

    async def end(self, cookie: str) -> None:
        """Log out, at all gateways. Raises ApiError if the store is away: others would not hear of it."""
        try:
            await self._store.ask("SET", self._ended_key(cookie), "1", "EX", LASTS_S)
        except StoreError as error:
            raise store_away(error) from None

    async def _has_ended(self, cookie: str) -> bool:
        """Whether its user has logged out. Nobody can tell while the store is away."""
        try:
            return bool(await self._store.ask("EXISTS", self._ended_key(cookie)))
        except StoreError:
            return False

    def _ended_key(self, cookie: str) -> str:
        """Has no part of the cookie that could be used."""
        return f"{self._key}:ended:{hashlib.sha256(cookie.encode()).hexdigest()}"

    async def logged_in(self, cookie: str) -> Caller:
        """Whose session this is. Raises ApiError if there is none, too."""
        caller = await self.caller(cookie)
        if caller is None:
            raise ApiError(401, "login_required", "Log in at /console/login.")
        return caller

    def token(self, cookie: str) -> str:
        """What a page of this session sends with each action, and a page of another origin does not know."""
        return self._signed(f"csrf {cookie}", "") if self._secret else ""

    async def acting(self, cookie: str, token: str) -> Caller:
        """Whose session it is. Raises ApiError if there is none, or if no page of it has sent the request with this
        token. Without API keys there is none: then anybody may call the API, too."""
        caller = await self.logged_in(cookie)
        if not (self._keyring.is_open or (token.isascii() and self._is_signed(f"csrf {cookie}", "", token))):
            raise ApiError(403, "invalid_token", "x-kvgate-csrf: reload the page, and try again.")
        return caller

    def _is_signed(self, text: str, key: str, signature: str) -> bool:
        return bool(self._secret) and hmac.compare_digest(self._signed(text, key), signature)

    def _signed(self, text: str, key: str) -> str:
        signed = text.encode() + self._keyring.digest_of(key)
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest()

    async def _learn(self, good_s: float) -> None:
        """Read the secret, unless that was tried within `good_s`: one request reads it, and the others wait for that.
        While the store is away, the one that was read last is good. Raises ApiError if there is none."""
        async with self._asking:
            if time.monotonic() >= self._asked_s + (good_s if self._secret else min(good_s, _DOUBTED_S)):
                self._asked_s = time.monotonic()
                try:
                    await self._store.ask("SET", self._key, secrets.token_hex(32), "NX")
                    stored = bytes(await self._store.ask("GET", self._key) or b"")
                    self._secret = self._signer.session_secret(stored) if stored and self._signer else stored
                except StoreError as error:
                    self._problem = error
            if not self._secret:
                raise store_away(self._problem)
