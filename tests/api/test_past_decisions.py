"""After a request, any gateway tells why it went where it went: to its tenant, and to admins."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from gateway.ops.cli.explain import reasons
from tests.api.stage import Stage, bearer, chat_body, fresh
from tests.polling import wait_until

CHAT = "/v1/chat/completions"
ALICE, ANNA, BOB, ROOT = (bearer(name) for name in ("alice", "anna", "bob", "root"))


def asked(stage: Stage, request_id: str, gateway: int = 0, headers: dict[str, str] | None = None) -> httpx.Response:
    """The answer about a request, at another gateway than the one that served it."""
    return stage.get(f"/v1/decisions/{quote(request_id, safe='')}", gateway, headers=headers or {})


def send(stage: Stage, request_id: str, gateway: int = 0, headers: dict[str, str] | None = None, **fields: Any) -> None:
    body = chat_body(fresh(), **fields)
    stage.post(CHAT, body, gateway, headers={"x-request-id": request_id, **(headers or {})})


def kept(stage: Stage, request_id: str, count: int = 1, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The records of this id, as soon as there are so many."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        answer = asked(stage, request_id, 1, headers)
        found[:] = answer.json()["decisions"] if answer.status_code == 200 else []
        return len(found) >= count

    wait_until(is_there)
    return found


def test_another_gateway_tells_why_a_request_went_where_it_went_and_what_others_would_have_cost(stage: Stage) -> None:
    def with_costs() -> dict[str, Any] | None:
        """A part of requests has them."""
        ids = [fresh("told") for _ in range(20)]
        for request_id in ids:
            send(stage, request_id, 0, max_tokens=1)
        return next((record for each in ids if (record := kept(stage, each)[0])["costs"]), None)

    record = wait_until(with_costs)
    assert (record["gateway"], record["status"], record["why"], record["failed"]) == ("gw0", 200, "cold", [])
    assert not any("not kept" in told for told in reasons(record))
    assert any("not kept" in told for told in reasons(record | {"costs": None})), "of most requests they are not"
    costs = {each["replica"]: each["cost"] for each in record["costs"]}
    assert set(costs) == {"r0", "r1", "r2"}
    assert costs[record["replica"]] == min(costs.values())
    assert "content" not in json.dumps(record)


@pytest.mark.parametrize("request_id", ["a b/c?d=e%2F..", "x" * 128])
def test_an_id_may_be_any_that_a_client_chose(stage: Stage, request_id: str) -> None:
    send(stage, request_id)
    assert kept(stage, request_id)[0]["request_id"] == request_id


def test_of_an_id_that_came_twice_the_last_request_is_told(stage: Stage) -> None:
    request_id = fresh("twice")
    send(stage, request_id, 0)
    kept(stage, request_id)
    send(stage, request_id, 1, model="nonesuch")
    wait_until(lambda: [record["status"] for record in kept(stage, request_id)] == [404])


def test_a_tenant_sees_its_own_requests_without_what_others_do(guarded: Stage) -> None:
    request_id = fresh("own")
    send(guarded, request_id, 0, ALICE)
    (own,) = kept(guarded, request_id, headers=ANNA)
    assert (own["tenant"], own["key"]) == ("research", "alice")
    assert own["replica"] in {"r0", "r1"}
    assert not own.keys() & {"costs", "gateway", "failed", "passed_over_tokens"}
    assert any("cold" in line for line in reasons(own)), "these are reasons enough"
    (all_of_it,) = kept(guarded, request_id, headers=ROOT)
    assert all_of_it["gateway"] == "gw0"


def test_another_tenant_gets_a_404_even_with_the_same_id(guarded: Stage) -> None:
    request_id = fresh("shared-id")
    send(guarded, request_id, 0, ALICE)
    kept(guarded, request_id, headers=ALICE)
    refused = asked(guarded, request_id, 1, BOB)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "decision_not_found")
    send(guarded, request_id, 0, BOB)
    assert [record["tenant"] for record in kept(guarded, request_id, headers=BOB)] == ["sales"]
    assert [record["tenant"] for record in kept(guarded, request_id, headers=ALICE)] == ["research"]
    assert [record["tenant"] for record in kept(guarded, request_id, 2, ROOT)] == ["sales", "research"]
    named = guarded.get(f"/v1/decisions/{request_id}?tenant=sales", headers=ROOT).json()["decisions"]
    assert [record["tenant"] for record in named] == ["sales"]
    refused = guarded.get(f"/v1/decisions/{request_id}?tenant=research", headers=BOB)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
    assert asked(guarded, request_id).status_code == 401


def test_requests_without_a_key_are_not_kept(guarded: Stage) -> None:
    stranger, last = fresh("stranger"), fresh("last")
    send(guarded, stranger, 0)
    send(guarded, last, 0, ALICE)
    kept(guarded, last, headers=ROOT)
    assert asked(guarded, stranger, 1, ROOT).status_code == 404


def test_attempts_that_failed_before_are_told(stage: Stage) -> None:
    def failed() -> list[dict[str, Any]]:
        """Of some requests; none while breakers keep all of them from the replicas that fail."""
        ids = [fresh("retried") for _ in range(20)]
        for request_id in ids:
            send(stage, request_id)
        return [each for request_id in ids for each in kept(stage, request_id)[0]["failed"]]

    for sim in stage.sims[:2]:
        sim.fail("error", status=503)
    try:
        first = wait_until(failed)[0]
    finally:
        for sim in stage.sims[:2]:
            sim.fail("none")
    assert first["replica"] in {"r0", "r1"}
    assert first["why"] == "status_503"


def test_kvgate_explain_tells_it_in_words(stage: Stage) -> None:
    request_id = fresh("explained")
    send(stage, request_id, 0)
    words = [sys.executable, "-P", "-m", "gateway.ops.cli", "explain", request_id, "--gateway", stage.gateways[1]]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout  # its record comes within a second
    (record,) = kept(stage, request_id)
    assert f"went to {record['replica']} (cold): the policy chose it" in told
    assert "at gw0: POST /v1/chat/completions was answered 200" in told
    assert json.loads(subprocess.run([*words, "--json"], capture_output=True, check=True).stdout)["decisions"] == [
        record
    ]
    unknown = subprocess.run([*words[:5], "nonesuch", *words[6:]], capture_output=True, text=True, check=False)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "No decision on a request of this id is kept" in unknown.stderr


def test_the_console_looks_back_too(guarded: Stage) -> None:
    request_id = fresh("console")
    send(guarded, request_id, 0, ALICE)
    (record,) = kept(guarded, request_id, headers=ROOT)
    assert asked(guarded, request_id).status_code == 401
    refused = guarded.get(f"/console/decisions/{request_id}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "login_required")
    with httpx.Client(base_url=guarded.gateways[1]) as browser:
        browser.post("/console/login", data={"key": "secret-root"})
        assert browser.get(f"/console/decisions/{request_id}").json()["decisions"] == [record]
