"""A running gateway takes the live fields of other settings."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from gateway.settings.config_file import SettingsError
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.live import LIVE, change, every_field, is_live

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
        ("security.image_hosts", security(image_hosts=["images.example"])),
        ("limits.max_in_flight", {"limits": {"max_in_flight": 7}}),
        ("timeouts.grace_s", {"timeouts": {"grace_s": 7}}),
        ("retries.max_attempts", {"retries": {"max_attempts": 7}}),
        ("health.hang_s", {"health": {"hang_s": 7}}),
        ("policy.max_active_requests", {"policy": {"max_active_requests": 7}}),
        ("queue.wait_s", {"queue": {"wait_s": 7}}),
        ("discovery.dns", {"discovery": {"dns": {"names": ["vllm.internal"]}}}),
        ("billing.prices", {"billing": {"prices": [{"model": "chat", "output_per_mtok": 4.0}]}}),
        ("log.level", {"log": {"level": "debug"}}),
        ("log.access_log", {"log": {"access_log": "-"}}),
    ],
)
def test_a_live_field_is_taken(path: str, sections: dict[str, Any]) -> None:
    changed = change(settings(), settings(**sections))
    assert (changed.settings, changed.taken, changed.left) == (settings(**sections), [path], [])
    assert is_live(path)


def test_a_check_that_looks_for_defaults_sees_them() -> None:
    """A request_s below the default idle_s is right, but not below an idle_s of the file."""
    short = settings(timeouts={"first_byte_s": 50, "request_s": 100})
    assert change(short, settings(timeouts={"first_byte_s": 50, "request_s": 100}, replicas=[])).taken == ["replicas"]
    with_idle = settings(timeouts={"first_byte_s": 50, "request_s": 100, "idle_s": 60})
    changed = change(with_idle, short)
    assert (changed.settings, changed.taken) == (short, ["timeouts.idle_s"])


def test_every_live_field_exists() -> None:
    fields = every_field(GatewaySettings)
    assert {*LIVE} <= {*fields, *(path.partition(".")[0] for path in fields)}


def test_every_other_field_is_left_and_named() -> None:
    wanted = settings(id="other", queue={"default_band": "batch"}, **security(share_cache=True, hosts=["a.example"]))
    changed = change(settings(), wanted)
    assert changed.taken == ["security.hosts"]
    assert changed.left == ["id", "queue.default_band", "security.share_cache"]
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
