"""Sessions of the console, by what the store does."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any, cast

import pytest

from coordinator.errors import StoreDown
from coordinator.store import Store
from gateway.console import sessions
from gateway.console.sessions import Sessions
from gateway.errors import ApiError
from gateway.records.record import Signer
from gateway.request.keyring import Keyring
from gateway.settings.gateway_settings import SecuritySettings


class Keeper:
    """A store that has the secret, and the sessions that have ended."""

    def __init__(self) -> None:
        self.value: bytes = b""
        self.ended: set[str] = set()
        self.is_away = False
        self.asked = 0

    async def ask(self, command: str, key: str, *arguments: Any) -> Any:
        self.asked += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise StoreDown("away")
        if command == "EXISTS":
            return int(key in self.ended)
        if command == "SET" and arguments[1:2] == ("EX",):
            self.ended.add(key)
        elif command == "SET" and not self.value:
            assert arguments[1:] == ("NX",)
            self.value = arguments[0].encode()
        return self.value


def of(store: Keeper, key: str = "secret-root", admin: bool = True, signer: Signer | None = None) -> Sessions:
    """The sessions of a gateway whose configuration has one key, named root."""
    sha256 = hashlib.sha256(key.encode()).hexdigest()
    keys = [{"name": "root", "sha256": sha256, "tenant": "operations", "admin": admin}]
    keyring = Keyring(SecuritySettings.model_validate({"api_keys": keys, "share_cache": True}))
    return Sessions(keyring, cast("Store", store), "", signer)


async def is_logged_in(at: Sessions, cookie: str) -> bool:
    return await at.caller(cookie) is not None


async def test_who_can_only_read_the_store_cannot_sign_a_session_where_there_is_a_secret_of_records() -> None:
    store = Keeper()
    one, other = (of(store, signer=Signer("0123456789abcdef", "")) for _ in range(2))
    cookie = await one.begin("secret-root")
    assert await is_logged_in(other, cookie)
    reader = of(store)  # it knows the secret in the store, and the digest of the key
    assert not await is_logged_in(one, await reader.begin("secret-root"))


async def test_a_session_lasts_for_twelve_hours_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    one = of(Keeper())
    cookie = await one.begin("secret-root")
    now_s += 12 * 3600 - 1
    assert await is_logged_in(one, cookie)
    now_s += 1
    assert not await is_logged_in(one, cookie)


async def test_all_sessions_end_at_all_gateways_when_the_secret_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Keeper()
    one, other = of(store), of(store)
    cookie = await one.begin("secret-root")
    assert await is_logged_in(one, cookie)
    assert await is_logged_in(other, cookie)
    store.value = b""
    assert await is_logged_in(one, cookie), "it does not ask the store for each request"
    monkeypatch.setattr(sessions, "_GOOD_S", 0)
    assert not await is_logged_in(one, cookie)
    assert not await is_logged_in(other, cookie)
    assert await is_logged_in(other, await one.begin("secret-root"))


async def test_a_session_ends_with_its_key_also_if_another_one_has_its_name() -> None:
    store = Keeper()
    cookie = await of(store).begin("secret-root")
    assert await is_logged_in(of(store), cookie)
    assert not await is_logged_in(of(store, "another"), cookie)
    assert not await is_logged_in(of(store, admin=False), cookie)


async def test_who_logs_out_is_logged_out_at_all_gateways_and_nobody_else_is() -> None:
    store = Keeper()
    one, other = of(store), of(store)
    cookie, another = await one.begin("secret-root"), await one.begin("secret-root")
    assert cookie != another
    await one.end(cookie)
    assert not await is_logged_in(other, cookie)
    assert await is_logged_in(other, another)
    assert not any(cookie in key or cookie.rpartition(".")[2] in key for key in store.ended)
    store.is_away = True
    with pytest.raises(ApiError, match="away"):
        await one.end(another)


async def test_while_the_store_is_away_sessions_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_GOOD_S", 0)
    store = Keeper()
    one = of(store)
    cookie = await one.begin("secret-root")
    store.is_away = True
    assert await is_logged_in(one, cookie)
    with pytest.raises(ApiError, match="away"):
        await of(store).caller(cookie)


@pytest.mark.parametrize("is_away", [False, True])
async def test_many_forged_cookies_read_the_store_once(is_away: bool) -> None:
    store = Keeper()
    one = of(store)
    cookie = await of(store).begin("secret-root")
    store.asked, store.is_away = 0, is_away
    forged = [f"{cookie.rpartition('.')[0]}.{number}" for number in range(100)]
    answers = await asyncio.gather(*(one.caller(each) for each in forged), return_exceptions=True)
    assert all(isinstance(each, ApiError) if is_away else each is None for each in answers)
    assert store.asked <= 2
