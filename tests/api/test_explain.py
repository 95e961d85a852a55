"""POST /v1/route/explain predicts a decision and its reason, and has no side effects."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis

from bench.cluster import Cluster
from tests.api.stage import Json, Stage, chat_body, error_of, fresh, text, user
from tests.gateway.simulator.pictures import data_url
from tests.polling import wait_until

COSTS = {"active", "backlog_tokens", "owned_tokens", "capacity_tokens", "matched_tokens", "charged_tokens"} | {
    "credit_tokens",
    "displaced_tokens",
    "load_tokens",
    "cost",
    "guarded",
    "has_room",
    "matched_keys",
    "cpu_credit",
    "store_credit",
    "replica",
}


def bodies() -> dict[str, Json]:
    """A new request of every kind, by path."""
    source = {"type": "base64", "data": data_url(60, (320, 320)).partition(",")[2]}
    picture = {"type": "image_url", "image_url": {"url": data_url(61, (320, 320))}}
    return {
        "/v1/chat/completions": {"messages": user([{"type": "text", "text": text()}, picture])},
        "/v1/completions": {"prompt": text()},
        "/v1/embeddings": {"input": [text(), "two"]},
        "/v1/responses": {"input": user(text())},
        "/v1/messages": {
            "system": text(),
            "max_tokens": 3,
            "messages": user([{"type": "image", "source": source}, {"type": "text", "text": "What?"}]),
        },
        "/tokenize": {"messages": user(text())},
        "/v1/rerank": {"query": text(), "documents": ["one", "two"]},
        "/v1/score": {"text_1": text(), "text_2": ["one", "two"]},
    }


@pytest.mark.parametrize("path", [path for path in bodies() if path != "/tokenize"])
def test_it_names_the_replica_that_place_then_takes(stage: Stage, path: str) -> None:
    body = {"model": "sim", **bodies()[path]}
    told = stage.post(path, body).headers
    first = told["x-kvgate-replica"]
    explained = stage.explain(body, gateway=1, path=path)
    assert (explained["path"], explained["model"], explained["served_model"]) == (path, "sim", "sim")
    assert explained["choice"]["replica"] == first, (told["x-kvgate-decision"], explained)
    assert explained["choice"]["why"] == "hit"

    # The matched tokens of two answers may differ. Each gateway learns the bytes per token itself, and the engine's
    # events may arrive in between. The engine does not serve a prompt's last token from its cache, and the gateway
    # subtracts a block from an estimate.
    def foretold() -> int:
        return int(stage.explain(body, path=path)["choice"]["matched_tokens"])

    before = foretold()
    placed = stage.post(path, body).headers
    known = {before, foretold()}
    assert 0 < min(known) - 2 * 16 <= int(placed["x-kvgate-matched-tokens"]) < max(known)
    assert placed["x-kvgate-replica"] == first


def test_a_prompt_whose_tokens_were_counted_is_held_by_nobody(stage: Stage) -> None:
    body = {"model": "sim", **bodies()["/tokenize"]}
    stage.post("/tokenize", body).raise_for_status()
    wait_until(lambda: not any(key["owners"] for key in stage.explain(body)["chain"]))
    stage.post("/v1/chat/completions", body).raise_for_status()
    wait_until(lambda: all(key["owners"] for key in stage.explain(body)["chain"]))


@pytest.mark.parametrize("path", [path for path in bodies() if path != "/tokenize"])
def test_a_bodys_api_is_known_by_its_fields(stage: Stage, path: str) -> None:
    assert stage.explain({"model": "sim", **bodies()[path]})["path"] == path


def test_it_shows_every_replicas_cost_with_its_terms(stage: Stage) -> None:
    context = text(6000)
    owner = stage.chat(context).replica
    explained = stage.explain(chat_body(context + " And now?"))
    assert explained["store"] == "up"
    assert [one["replica"] for one in explained["replicas"]] == ["r0", "r1", "r2"]
    assert all(one.keys() == COSTS for one in explained["replicas"])
    costs = {one["replica"]: one["cost"] for one in explained["replicas"]}
    assert min(costs, key=lambda replica: costs[replica]) == owner == explained["choice"]["replica"]
    assert explained["prompt_tokens"] >= explained["choice"]["matched_tokens"] > 1000


def test_it_shows_the_chain_with_owners_and_images(stage: Stage) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(62)}}
    content = [{"type": "text", "text": text(1000)}, picture, {"type": "text", "text": text(1000)}]
    owner = stage.chat(content).replica
    chain = stage.explain(chat_body([*content, {"type": "text", "text": fresh()}]))["chain"]
    assert [len(link["key"]) for link in chain] == [32] * len(chain)
    assert [link["tokens"] for link in chain] == sorted(link["tokens"] for link in chain)
    assert (chain[0]["images"], chain[-1]["images"]) == (0, 1)
    owners = [[one["replica"] for one in link["owners"]] for link in chain]
    assert owners[0] == [owner]
    assert owners[-1] == []
    assert chain[0]["owners"][0]["kind"] in ("claim", "resident")


def test_it_shows_what_the_engines_events_have_confirmed(stage: Stage) -> None:
    body = chat_body(text())
    answer = stage.post("/v1/chat/completions", body)
    owner = stage.until_resident(body, gateway=1, prompt_tokens=answer.json()["usage"]["prompt_tokens"])
    assert (owner["replica"], owner["medium"]) == (answer.headers["x-kvgate-replica"], "gpu")
    assert re.fullmatch(r"[0-9a-f]{16}", owner["block_hash"])


def test_without_an_agent_it_shows_claims(unfollowed: Stage) -> None:
    body = chat_body(text())
    replica = unfollowed.post("/v1/chat/completions", body).headers["x-kvgate-replica"]
    (owner,) = unfollowed.owners(body)
    assert (owner["replica"], owner["kind"]) == (replica, "claim")
    assert "block_hash" not in owner


def test_it_writes_nothing_and_asks_no_replica(stage: Stage, open_cluster: Cluster) -> None:
    context = text()
    stage.chat(context)
    body = chat_body(context + " More?")
    seen = stage.requests_seen()
    with redis.Redis.from_url(open_cluster.redis_url) as store:

        def explained_without_a_trace() -> bool:
            before = wait_until(lambda: _contents_at_rest(store))
            for policy in ("prefix_kv_aware", "round_robin", "consistent_hash"):
                stage.explain(body, headers={"x-kvgate-policy": policy})
            return _contents(store) == before

        # A gateway may still write what it learned from an earlier test. A write by explain would show every time.
        wait_until(explained_without_a_trace)
    assert stage.requests_seen() == seen


# Gateways, agents and the gateways that apply event streams renew these keys all the time.
_HEARTBEATS = (b":leases", b":gateways", b":agents", b":engines")


def _contents(store: redis.Redis) -> dict[bytes, Any]:
    """Each key of the pool that placements write, with its value."""
    pattern = "kvgate:{kvgate-sim-vlm*"
    keys = sorted(key for key in store.scan_iter(pattern) if not key.endswith(_HEARTBEATS))
    return {key: store.dump(key) for key in keys}


def _contents_at_rest(store: redis.Redis) -> dict[bytes, Any] | None:
    """The contents; None while the gateways still write the results of earlier requests."""
    first = _contents(store)
    return first if first == _contents(store) else None


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ([], 400, "body"),
        ({"model": "nonesuch", "prompt": "x"}, 404, "model"),
        ({"model": "sim", "messages": 3}, 400, "messages"),
    ],
)
def test_a_body_that_could_not_be_served_cannot_be_explained(stage: Stage, body: Any, status: int, param: str) -> None:
    answer = stage.post("/v1/route/explain", body)
    assert answer.status_code == status
    assert error_of(answer)["param"] == param
