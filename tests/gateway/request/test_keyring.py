"""API keys identify callers, and each tenant has its own cache salts."""

from __future__ import annotations

import hashlib

import pytest

from gateway.errors import ApiError
from gateway.request.keyring import Caller, Keyring
from gateway.settings.gateway_settings import ApiKey, SecuritySettings


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keyring(**settings: object) -> Keyring:
    keys = [
        ApiKey(name="one", sha256=digest("key-a"), tenant="a"),
        ApiKey(name="two", sha256=digest("key-b"), tenant="b", admin=True),
    ]
    values = {"api_keys": keys, "cache_salt_secret": "0123456789abcdef", **settings}
    return Keyring(SecuritySettings.model_validate(values))


def test_without_keys_everybody_is_the_same_caller() -> None:
    assert Keyring(SecuritySettings()).identify({}) == Caller(None, True, is_admin=True)


def test_a_key_names_its_tenant_by_either_header() -> None:
    assert keyring().identify({"authorization": "Bearer key-a"}) == Caller("a", False, "one")
    assert keyring().identify({"x-api-key": "key-b"}) == Caller("b", True, "two", is_admin=True)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": "Basic key-a"}, "missing_api_key"),
        ({"authorization": "Bearer key-c"}, "invalid_api_key"),
        ({"authorization": "Bearer \udcff"}, "invalid_api_key"),
    ],
)
def test_a_missing_or_unknown_key_is_a_401(headers: dict[str, str], code: str) -> None:
    with pytest.raises(ApiError) as refused:
        keyring().identify(headers)
    assert (refused.value.status, refused.value.code) == (401, code)


def test_tenants_never_share_a_salt_and_a_client_can_separate_further() -> None:
    ring = keyring()
    a, b = Caller("a", False), Caller("b", False)
    salts = [ring.cache_salt(a, None), ring.cache_salt(b, None), ring.cache_salt(a, "x"), ring.cache_salt(a, "y")]
    assert len(set(salts)) == 4
    assert ring.cache_salt(a, "x") == salts[2]


def test_no_choice_of_names_makes_two_tenants_salts_meet() -> None:
    ring = keyring()
    assert ring.cache_salt(Caller("ab", False), "c") != ring.cache_salt(Caller("a", False), "bc")


def test_shared_caches_leave_the_clients_salt_alone() -> None:
    ring = keyring(share_cache=True)
    assert ring.cache_salt(Caller("a", False), "x") == "x"
    assert ring.cache_salt(Caller("a", False), None) is None
