"""The OpenAPI document names each path that the gateway answers itself, and what it says of keys is true."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.stage import Json, Stage, bearer, error_of

PATHS = {
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/route/explain",
    "/v1/demand",
    "/v1/queue",
    "/v1/replicas",
    "/v1/replicas/{name}",
    "/v1/replicas/{name}/drain",
    "/v1/replicas/{name}/undrain",
    "/v1/keys",
    "/v1/keys/{key_id}",
    "/v1/keys/{key_id}/rotate",
    "/v1/audit",
    "/v1/budgets",
    "/v1/usage",
    "/v1/decisions",
    "/v1/decisions/{request_id}",
}


@pytest.fixture
def told(guarded: Stage) -> Json:
    answer = guarded.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    document: Json = answer.json()
    return document


def operations(told: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_it_names_each_path_and_says_what_it_is_for(told: Json, guarded: Stage) -> None:
    assert told["openapi"].startswith("3.")
    assert told["info"]["version"] == guarded.get("/version").json()["version"]
    assert set(told["paths"]) == PATHS
    named = [operation["operationId"] for _, _, operation in operations(told)]
    assert len(set(named)) == len(named)
    assert all(operation["summary"] for _, _, operation in operations(told))
    assert [each["name"] for each in told["paths"]["/v1/demand"]["get"]["parameters"]] == ["model"]
    assert "requestBody" in told["paths"]["/v1/route/explain"]["post"]


def test_what_it_says_of_keys_is_true(told: Json, guarded: Stage) -> None:
    schemes = set(told["components"]["securitySchemes"])
    for method, path, operation in operations(told):
        asked = path.replace("{name}", "sim").replace("{key_id}", "k")
        headers = {"content-type": "application/json"}
        answer = guarded.send(method, asked, headers=headers)
        if "security" not in operation:
            assert answer.status_code == 200, path
            continue
        assert {name for way in operation["security"] for name in way} == schemes, path
        assert error_of(answer)["code"] == "missing_api_key", path
        answer = guarded.send(method, asked, headers=headers | bearer("alice"))
        needs_admin = "admin" in operation["description"]
        found = 404 if "{request_id}" in path else 200
        assert answer.status_code == (403 if needs_admin else found), path
        assert not needs_admin or error_of(answer)["code"] == "admin_key_required", path


def test_content_types_are_those_of_the_answers(told: Json, stage: Stage) -> None:
    for method, path, operation in operations(told):
        if method == "GET" and "{" not in path and path != "/v1/decisions":
            (content,) = operation["responses"]["200"]["content"]
            assert stage.get(path).headers["content-type"].partition(";")[0] == content, path
