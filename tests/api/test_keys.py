"""API keys decide who may call, and who may see the requests of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.cluster import Cluster
from tests.api.stage import Stage, bearer, chat_body, error_of, running_gateway, text


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": "Bearer"}, "missing_api_key"),
        ({"authorization": "Basic c2VjcmV0LWFsaWNl"}, "missing_api_key"),
        ({"authorization": "Bearer secret-nobody"}, "invalid_api_key"),
        ({"authorization": "Bearer secret-alice2"}, "invalid_api_key"),
        ({"x-api-key": "secret-nobody"}, "invalid_api_key"),
        ({"authorization": b"Bearer \xff\xfe"}, "invalid_api_key"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/route/explain", "/v1/nonesuch"])
def test_without_a_known_key_nothing_is_served(guarded: Stage, path: str, headers: Any, code: str) -> None:
    seen = guarded.requests_seen()
    method = "GET" if path == "/v1/models" else "POST"
    answer = guarded.send(method, path, json=chat_body("x"), headers=headers)
    assert answer.status_code == 401
    assert (error_of(answer)["code"], error_of(answer)["type"]) == (code, "authentication_error")
    assert guarded.requests_seen() == seen


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
def test_probes_need_no_key(guarded: Stage, path: str) -> None:
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize(
    "headers", [bearer("alice"), {"x-api-key": "secret-alice"}, {"authorization": "bearer secret-bob"}]
)
def test_a_known_key_is_served_under_either_header(guarded: Stage, headers: dict[str, str]) -> None:
    assert guarded.post("/v1/chat/completions", chat_body(text(50)), headers=headers).status_code == 200
    assert guarded.get("/v1/models", headers=headers).json()["data"][0]["id"] == "sim"


@pytest.mark.parametrize("stream", [False, True])
def test_only_an_admin_sees_where_a_request_went(guarded: Stage, stream: bool) -> None:
    def decision_headers(name: str) -> list[str]:
        answer = guarded.post("/v1/chat/completions", chat_body(text(50), stream=stream), headers=bearer(name))
        assert answer.status_code == 200
        return [header for header in answer.headers if header.startswith("x-kvgate-")]

    assert decision_headers("alice") == []
    names = ("replica", "matched-tokens", "next-boundary-tokens", "decision")
    assert decision_headers("root") == [f"x-kvgate-{name}" for name in names]


def test_only_an_admin_may_have_a_decision_explained(guarded: Stage) -> None:
    body = chat_body(text(50))
    refused = guarded.post("/v1/route/explain", body, headers=bearer("alice"))
    assert refused.status_code == 403
    assert (error_of(refused)["code"], error_of(refused)["type"]) == ("admin_key_required", "permission_error")
    assert guarded.post("/v1/route/explain", body, headers=bearer("root")).status_code == 200


def test_decisions_can_be_exposed_to_everybody(sharing: Stage) -> None:
    body = chat_body(text(50))
    assert sharing.post("/v1/chat/completions", body, headers=bearer("bob")).headers["x-kvgate-replica"]
    assert sharing.post("/v1/route/explain", body, headers=bearer("bob")).status_code == 200


def test_a_clients_key_is_not_shown_to_replicas_where_keys_are_ours(guarded: Stage, stage: Stage) -> None:
    answer = guarded.post("/v1/chat/completions", chat_body(text(50)), headers=bearer("alice"))
    assert "Authorization" not in guarded.seen(answer)["headers"]
    theirs = stage.post("/v1/chat/completions", chat_body(text(50)), headers={"authorization": "Bearer the-replicas"})
    assert stage.seen(theirs)["headers"]["Authorization"] == "Bearer the-replicas"


def test_replicas_get_a_key_of_their_own_instead_of_the_clients(
    stage: Stage, open_cluster: Cluster, tmp_path: Path
) -> None:
    config = {"security": {"replica_api_key": "for-replicas"}}
    with running_gateway(tmp_path, open_cluster.redis_url, stage.sims, config) as url:
        headers = {"authorization": "Bearer mine"}
        answer = stage.http.post(url + "/v1/chat/completions", json=chat_body("x"), headers=headers)
        assert stage.seen(answer)["headers"]["Authorization"] == "Bearer for-replicas"
