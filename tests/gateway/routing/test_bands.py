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


@pytest.mark.parametrize(
    ("queue", "tenants", "bands"),
    [
        ({}, [], {("other", 0): 1, ("other", 1): 0, ("other", 100): 0, ("other", -1): 2, ("other", -100): 2}),
        ({}, [BATCH], {("b", None): 2, ("b", 0): 2, ("b", 100): 2, ("b", -1): 2, ("other", 100): 0}),
        ({}, [REALTIME], {("r", None): 0, ("r", 0): 1, ("r", 1): 0, ("r", -1): 2}),
        ({}, [{"name": "unset"}], {("unset", None): 1, ("unset", 1): 0}),
        (
            {"bands": [{"name": name} for name in "abcd"], "default_band": "c"},
            [],
            {("other", 1): 1, ("other", 2): 0, ("other", 3): 0, ("other", -1): 3, ("other", -2): 3},
        ),
    ],
)
def test_each_step_of_an_objectives_priority_is_a_band_but_none_before_its_tenants(
    queue: dict[str, Any], tenants: list[dict[str, Any]], bands: dict[tuple[str, int | None], int]
) -> None:
    of = Tenants(GatewaySettings.model_validate({"tenants": tenants, "queue": {**queue, "engine_priority": True}}))
    default = [*"abcd"].index("c") if queue else 1
    for (name, priority), band in bands.items():
        assert of.of(name, None, priority=priority)[1].band == of.band(name, priority) == band, (name, priority)
        assert of.engine_priority(name, priority) == band - default


def test_a_request_may_use_the_room_of_the_band_that_its_objective_gives_it() -> None:
    of = Tenants(GatewaySettings.model_validate({"tenants": [REALTIME, BATCH]}))
    assert [of.of("other", None, priority=priority)[0] for priority in (1, 0, -1)] == [1.0, 0.8, 0.8]
