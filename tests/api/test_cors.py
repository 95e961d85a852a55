"""Web pages of allowed origins may call a gateway from a browser, and others may not (CORS)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster
from tests.api.conftest import GUARDED
from tests.api.stage import Stage, bearer, chat_body, fresh, running_gateway

PAGE, OTHER = "https://app.example.com", "https://evil.example.com"
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def allowing(guarded_cluster: Cluster, guarded: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The guarded cluster's replicas behind a gateway that pages of one origin may call."""
    security = {**GUARDED["security"], "allow_origins": [PAGE]}
    folder = tmp_path_factory.mktemp("allowing")
    with running_gateway(folder, guarded_cluster.redis_url, guarded.sims, {"security": security}) as url:
        yield replace(guarded, gateways=[url])


def told(answer: httpx.Response) -> dict[str, Any]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


def test_a_preflight_needs_no_key(allowing: Stage) -> None:
    answer = allowing.send("OPTIONS", "/v1/chat/completions", headers={"origin": PAGE, **ASKED})
    assert (answer.status_code, answer.content) == (204, b"")
    assert told(answer) == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "GET, POST, PUT, PATCH, DELETE",
        "access-control-allow-headers": "authorization,content-type",
        "access-control-max-age": "600",
    }
    assert answer.headers["vary"] == "origin"


def test_a_preflight_of_another_origin_allows_nothing(allowing: Stage) -> None:
    for origin in (OTHER, PAGE + ".evil.com", "null", PAGE.upper()):
        answer = allowing.send("OPTIONS", "/v1/chat/completions", headers={"origin": origin, **ASKED})
        assert (answer.status_code, told(answer), answer.headers["vary"]) == (204, {}, "origin")


def test_pages_may_read_answers_streams_and_errors(allowing: Stage) -> None:
    origin = {"origin": PAGE}
    exposed = {"access-control-allow-origin": PAGE, "access-control-expose-headers": "*"}
    for fields in ({}, {"stream": True}):
        headers = {**origin, **bearer("alice")}
        answer = allowing.post("/v1/chat/completions", chat_body(fresh(), **fields), headers=headers)
        assert (answer.status_code, told(answer)) == (200, exposed)
    refused = allowing.post("/v1/chat/completions", chat_body(fresh()), headers=origin)
    assert (refused.status_code, told(refused)) == (401, exposed)
    assert told(allowing.get("/health", headers=origin)) == exposed
    assert told(allowing.get("/v1/models", headers={"origin": OTHER, **bearer("alice")})) == {}


def test_without_the_setting_nothing_is_said(guarded: Stage) -> None:
    headers = {"origin": PAGE, **bearer("alice")}
    assert told(guarded.get("/v1/models", headers=headers)) == {}
    preflight = guarded.send("OPTIONS", "/v1/chat/completions", headers={"origin": PAGE, **ASKED})
    assert (preflight.status_code, told(preflight)) == (401, {})


def test_the_console_and_metrics_are_for_no_other_page(allowing: Stage) -> None:
    for path in ("/console", "/console/live", "/console/chat", "/console/login", "/metrics"):
        assert told(allowing.get(path, headers={"origin": PAGE})) == {}
        assert told(allowing.send("OPTIONS", path, headers={"origin": PAGE, **ASKED})) == {}
