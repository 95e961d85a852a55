"""Each tenant has its own cache salts. (tests/api/test_keys.py and test_tenants.py show what keys are good for.)"""

from __future__ import annotations

from gateway.request.keyring import Caller, Keyring
from gateway.settings.gateway_settings import ApiKey, SecuritySettings


def test_no_choice_of_names_makes_two_tenants_salts_meet() -> None:
    keys = [ApiKey(name=each, sha256=each * 64, tenant=each) for each in ("a", "b")]
    ring = Keyring(SecuritySettings.model_validate({"api_keys": keys, "cache_salt_secret": "0123456789abcdef"}))
    assert ring.cache_salt(Caller("ab", False), "c") != ring.cache_salt(Caller("a", False), "bc")
