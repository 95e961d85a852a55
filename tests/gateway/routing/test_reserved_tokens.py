"""What a request of a tenant with limits reserves."""

from __future__ import annotations

import random

from gateway.request.keyring import Caller
from gateway.routing.tenants import Tenants
from gateway.settings.gateway_settings import GatewaySettings, SecuritySettings
from gateway.settings.queue_settings import AccountLimitSettings, TenantSettings


def tenants() -> Tenants:
    limits = AccountLimitSettings(tokens_per_min=1000)
    return Tenants(GatewaySettings(tenants=[TenantSettings(name="team", limits=limits)]))


def output_tokens(known: Tenants, max_output_tokens: int | None, most_tokens: int = 0, prompt_tokens: int = 0) -> int:
    limits = known.limits_of(
        Caller("team", False), max_output_tokens, True, most_tokens=most_tokens, prompt_tokens=prompt_tokens
    )
    assert limits is not None
    return limits.output_tokens


def test_a_request_reserves_its_own_limit_and_no_more_than_its_context_has_room_for() -> None:
    known = tenants()
    assert output_tokens(known, 5000) == 5000
    assert output_tokens(known, 5000, most_tokens=4096, prompt_tokens=1096) == 3000
    assert output_tokens(known, 10, most_tokens=4096, prompt_tokens=5000) == 0


def test_a_request_without_a_limit_reserves_what_one_of_a_hundred_answers_reaches() -> None:
    known = tenants()
    assert output_tokens(known, None) == 200
    dice = random.Random(5)
    for _ in range(3000):
        known.used("team", 0, dice.randint(1, 1000))
    assert 900 <= output_tokens(known, None) <= 1000
    for _ in range(1000):
        known.used("team", 0, 10)
    assert output_tokens(known, None) < 20
    for _ in range(20):
        known.used("team", 0, 4000)
    assert 3900 <= output_tokens(known, None) <= 4000


def test_a_request_is_charged_to_its_tenant_and_its_key_as_far_as_these_have_limits() -> None:
    own = AccountLimitSettings(concurrency=2)
    in_file = {"name": "in file", "sha256": "0" * 64, "tenant": "team", "limits": own}
    security = SecuritySettings.model_validate({"api_keys": [in_file], "share_cache": True})
    known = Tenants(GatewaySettings(tenants=[TenantSettings(name="team", limits=own)], security=security))

    def charged(caller: Caller, can_wait: bool = True) -> list[tuple[str, int]]:
        limits = known.limits_of(caller, None, can_wait)
        return [(each.account, each.concurrency) for each in limits.accounts] if limits else []

    configured = Caller("team", False, id="in file", account="in file")
    made = Caller("other", False, id="k-2", is_recorded=True, limits=own, account="k-1")
    assert charged(configured) == [("team", 2), ("key:in%20file", 2)]
    assert charged(configured, can_wait=False) == [("team", 0), ("key:in%20file", 0)]
    assert charged(made) == [("key:k-1", 2)]
    assert charged(Caller("other", False)) == []
