"""Each tenant has its own cache salts. (tests/api/test_keys.py and test_tenants.py show what keys are good for.)"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import cast

import pytest

from gateway.errors import ApiError
from gateway.records.key_record import KeyRecord
from gateway.records.record import Record, Signer
from gateway.records.record_book import RecordBook
from gateway.request.keyring import Caller, ExpiryClock, Keyring
from gateway.settings.gateway_settings import ApiKey, SecuritySettings

SIGNER = Signer("0123456789abcdef", "")
HOUR_MS = 3_600_000


class Book:
    """A book of records that was read, or not yet."""

    signer = SIGNER

    def __init__(self, *, has_read: bool = True) -> None:
        self.has_read = has_read
        self.on_change: list[Callable[[], None]] = []
        self._records: list[Record] = []

    def of_kind(self, _kind: str) -> list[Record]:
        return self._records

    def learn(self, *keys: KeyRecord) -> None:
        self._records = [SIGNER.write(key.field, 1, key.facts(), is_removed=key.is_removed) for key in keys]
        for tell in self.on_change:
            tell()


def keyring(book: Book) -> Keyring:
    """The keys of a gateway whose configuration has the admin's key `root`."""
    root = ApiKey(name="root", sha256=sha256(b"root").hexdigest(), tenant="ops", admin=True)
    security = {"api_keys": [root], "cache_salt_secret": "0123456789abcdef", "records_secret": "0123456789abcdef"}
    return Keyring(SecuritySettings.model_validate(security), cast("RecordBook", book))


def made(text: str, name: str = "batch", hours: float = 1, **more: object) -> KeyRecord:
    digest, expires_ms = sha256(text.encode()).hexdigest(), int(time.time() * 1000 + hours * HOUR_MS)
    key = KeyRecord(f"k-{text}", name, digest, "team", False, False, ("sim",), expires_ms, expires_ms, "root", 0)
    return replace(key, **more)  # type: ignore[arg-type]


def refusal(ring: Keyring, text: str) -> tuple[int, str]:
    with pytest.raises(ApiError) as error:
        ring.identify({"x-api-key": text})
    return error.value.status, error.value.code


def test_a_key_of_a_record_means_what_its_record_says() -> None:
    book = Book()
    ring = keyring(book)
    assert refusal(ring, "new") == (401, "invalid_api_key")
    book.learn(made("new", manages_keys=True))
    caller = ring.identify({"authorization": "Bearer new"})
    assert caller == Caller("team", False, "batch", False, True, frozenset({"sim"}), "k-new", True, account="k-new")
    assert [caller.may_use(model) for model in ("sim", "large")] == [True, False]
    assert ring.identify({"x-api-key": "root"}).is_admin


def test_keys_that_were_revoked_or_have_expired_are_refused_also_while_they_are_in_use() -> None:
    book = Book()
    ring = keyring(book)
    book.learn(made("revoked"), made("expired", hours=0.0001))
    callers = [ring.identify({"x-api-key": name}) for name in ("revoked", "expired")]
    book.learn(made("revoked", is_removed=True), made("expired", hours=-1))
    for name, caller in zip(("revoked", "expired"), callers, strict=True):
        assert refusal(ring, name) == (401, "invalid_api_key")
        assert not ring.knows(caller)
        with pytest.raises(ApiError):
            ring.refuse_revoked(caller)
    ring.refuse_revoked(ring.identify({"x-api-key": "root"}))


def test_before_the_store_was_read_only_configured_keys_are_known_and_no_other_is_called_wrong() -> None:
    book = Book(has_read=False)
    ring = keyring(book)
    assert refusal(ring, "new") == (503, "keys_unknown")
    assert ring.identify({"x-api-key": "root"}).is_admin


def test_no_record_opens_a_gateway_or_closes_one_that_is_open() -> None:
    book = Book()
    assert not keyring(book).is_open
    ring = Keyring(SecuritySettings(), cast("RecordBook", book))
    book.learn(made("new"))
    assert ring.is_open


def test_two_keys_of_one_name_are_two_keys() -> None:
    book = Book()
    ring = keyring(book)
    book.learn(made("one", "same", admin=True), made("two", "same"))
    assert ring.admin("k-one") == ring.identify({"x-api-key": "one"})
    assert ring.admin("k-two") is None
    assert ring.digest_of("k-one") != ring.digest_of("k-two")
    assert ring.admin("same") is None


def test_the_time_by_which_keys_expire_goes_back_only_with_a_clock_that_was_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ExpiryClock()
    for now_s, expected_s in ((1000.0, 1000.0), (990.0, 1000.0), (1001.0, 1001.0), (5000.0, 5000.0), (1002.0, 1002.0)):
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        assert clock.now_ms() == expected_s * 1000


def test_no_choice_of_names_makes_two_tenants_salts_meet() -> None:
    keys = [ApiKey(name=each, sha256=each * 64, tenant=each) for each in ("a", "b")]
    ring = Keyring(SecuritySettings.model_validate({"api_keys": keys, "cache_salt_secret": "0123456789abcdef"}))
    assert ring.cache_salt(Caller("ab", False), "c") != ring.cache_salt(Caller("a", False), "bc")
