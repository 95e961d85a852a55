"""What a `Job` is made of."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gateway.metrics.gateway_metrics import Metrics
from gateway.request.job import Job
from gateway.request.keyring import Caller, Keyring
from gateway.request.objectives import Objectives
from gateway.request.reader import Reader
from gateway.request.reading import BodyHead, ParsedBody
from gateway.settings.gateway_settings import GatewaySettings
from tests.gateway.routing.test_router import job, lonely_router


async def test_each_thing_that_a_request_says_is_in_the_field_of_its_name() -> None:
    settings, path = GatewaySettings(), "/v1/chat/completions"
    reader = Reader(
        settings, Keyring(settings.security), lonely_router()._fleet, Metrics(), Objectives(settings.discovery)
    )
    of_body: dict[str, Any] = {each.name: object() for each in fields(ParsedBody)}
    of_body |= {"path": path, "prompt": None, "content_type": "text/x"}
    others: dict[str, Any] = {name: object() for name in ("method", "target", "session", "is_traced", "priority")}
    caller, route, policy = Caller(None, True), job(b"a" * 16).route, "round_robin"
    made = reader._job(BodyHead(path), b"", ParsedBody(**of_body), route, "id", caller, policy, {}, **others)
    told = of_body | others | {"id": "id", "caller": caller, "policy": policy, "headers": {"content-type": "text/x"}}
    told |= {"route": route, "prompt_tokens": 100}
    assert {name: getattr(made, name) for name in told.keys() & set(Job._fields)} == {
        name: what for name, what in told.items() if name in Job._fields
    }
    assert set(Job._fields) - told.keys() == {"endpoint", "images", "asks_ids"}
