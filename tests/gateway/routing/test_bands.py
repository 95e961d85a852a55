"""What the configuration says of tenants and bands."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.routing.tenants import Tenants
from gateway.settings.gateway_settings import GatewaySettings

REALTIME, BATCH = {"name": "r", "priority": "realtime"}, {"name": "b", "priority": "batch"}


@pytest.mark.parametrize(
    ("tenants", "queue", "shares"),
    [
        ([REALTIME, BATCH], {"slots": 4}, {"r": 1.0, "other": 1.0, "b": 0.8}),
        ([REALTIME, BATCH], {"slots": 5}, {"r": 1.0, "other": 0.8, "b": 0.8}),
        ([], {}, {"other": 1.0}),
        ([BATCH], {}, {"other": 1.0, "b": 0.8}),
        ([REALTIME, BATCH], {}, {"r": 1.0, "other": 0.8, "b": 0.8}),
        ([REALTIME], {"default_band": "realtime"}, {"r": 1.0, "other": 1.0}),
        ([REALTIME], {"bands": [{"name": "realtime"}, {"name": "normal", "room_share": 1}]}, {"r": 1.0, "other": 1.0}),
        (
            [REALTIME],
            {"bands": [{"name": "realtime", "room_share": 0.5}, {"name": "normal"}]},
            {"r": 0.5, "other": 0.8},
        ),
    ],
)
def test_a_band_leaves_room_to_those_before_it_if_anybody_has_one(
    tenants: list[dict[str, Any]], queue: dict[str, Any], shares: dict[str, float]
) -> None:
    policy = {"max_active_requests": queue.pop("slots", None)}
    config = {"replicas": [], "tenants": tenants, "queue": queue, "policy": policy}
    settings = GatewaySettings.model_validate(config)
    assert {name: Tenants(settings).of(name, None)[0] for name in shares} == shares
