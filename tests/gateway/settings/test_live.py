"""A running gateway takes the live fields of other settings."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from gateway.settings.config_file import SettingsError
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.live import LIVE, change

KEY = {"name": "a", "tenant": "team", "sha256": sha256(b"a").hexdigest()}
RUNNING = {
    "id": "g",
    "replicas": [{"id": "r0", "url": "http://r0:8000"}],
    "security": {"api_keys": [KEY], "cache_salt_secret": "0123456789abcdef"},
}


def settings(**sections: Any) -> GatewaySettings:
    return GatewaySettings.model_validate(RUNNING | sections)


def security(**fields: Any) -> dict[str, Any]:
    return {"security": {**RUNNING["security"], **fields}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("path", "sections"),
    [
        ("replicas", {"replicas": []}),
        ("tenants", {"tenants": [{"name": "team", "weight": 2}]}),
        ("security.api_keys", security(api_keys=[KEY | {"tenant": "other"}])),
        ("security.allow_origins", security(allow_origins=["https://a.example"])),
        ("security.hosts", security(hosts=["a.example"])),
    ],
)
def test_a_live_field_is_taken(path: str, sections: dict[str, Any]) -> None:
    changed = change(settings(), settings(**sections))
    assert (changed.settings, changed.taken, changed.left) == (settings(**sections), [path], [])
    assert path in LIVE


def test_every_other_field_is_left_and_named() -> None:
    wanted = settings(id="other", queue={"wait_s": 7}, **security(share_cache=True, hosts=["a.example"]))
    changed = change(settings(), wanted)
    assert changed.taken == ["security.hosts"]
    assert changed.left == ["id", "queue.wait_s", "security.share_cache"]
    assert changed.settings == settings(**security(hosts=["a.example"]))


@pytest.mark.parametrize(("running", "wanted"), [([KEY], []), ([], [KEY])])
def test_from_no_keys_to_some_and_back_needs_a_restart(running: list[Any], wanted: list[Any]) -> None:
    """Bodies are read in another way then."""
    changed = change(settings(**security(api_keys=running)), settings(**security(api_keys=wanted)))
    assert (changed.taken, changed.left) == ([], ["security.api_keys"])


def test_live_fields_that_do_not_fit_the_running_ones_are_refused() -> None:
    bands = [{"name": "vip"}, {"name": "rest"}]
    wanted = settings(queue={"bands": bands, "default_band": "rest"}, tenants=[{"name": "team", "priority": "vip"}])
    with pytest.raises(SettingsError, match=r"the priority vip, which is none of queue.bands.*restart"):
        change(settings(), wanted)
