"""The headers of requests and of their answers."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.api.stage import Stage, chat_body, fresh, text


@pytest.mark.parametrize("given", ["trace-1", "a b", "x" * 128])
def test_a_request_id_is_echoed_and_passed_on(stage: Stage, given: str) -> None:
    given = (fresh("id") + given)[:128]
    answer = stage.post("/v1/chat/completions", chat_body(text(50)), headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given
    assert answer.json()["id"] == f"chatcmpl-{given}"
    assert stage.seen(answer)["headers"]["X-Request-Id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "caf\u00e9", "tab\there"])
def test_a_request_without_a_usable_id_is_given_one(stage: Stage, given: str) -> None:
    answer = stage.post("/v1/chat/completions", chat_body(text(50)), headers={"x-request-id": given.encode("latin-1")})
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])
    assert stage.seen(answer)["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/ready", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models/nonesuch", 404),
        ("GET", "/nonesuch", 404),
        ("POST", "/v1/chat/completions", 400),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/v1/route/explain", 400),
    ],
)
def test_every_answer_carries_its_request_id(stage: Stage, method: str, path: str, status: int) -> None:
    given = fresh("id")
    answer = stage.send(method, path, headers={"x-request-id": given})
    assert answer.status_code == status
    assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_where_it_came_from_and_why(stage: Stage, stream: bool) -> None:
    body = chat_body(text(), stream=stream)
    cold = stage.post("/v1/chat/completions", body).headers
    assert cold["x-kvgate-decision"] == "cold; policy=prefix_kv_aware; state=exact"
    assert cold["x-kvgate-matched-tokens"] == "0"
    warm = stage.post("/v1/chat/completions", body, gateway=1).headers
    assert warm["x-kvgate-decision"] == "hit; policy=prefix_kv_aware; state=exact"
    assert int(warm["x-kvgate-matched-tokens"]) > 900
    assert warm["x-kvgate-replica"] == cold["x-kvgate-replica"]


def test_an_answer_from_a_replica_without_events_says_that_nothing_confirms_its_prediction(unfollowed: Stage) -> None:
    context = text()
    assert unfollowed.chat(context).decision == "cold; policy=prefix_kv_aware; state=degraded"
    warm = unfollowed.chat(context)
    assert warm.decision == "hit; policy=prefix_kv_aware; state=degraded"
    assert warm.matched_tokens > 900


def test_an_answer_says_up_to_where_more_may_be_cached_than_is_known(stage: Stage) -> None:
    def next_boundary(headers: httpx.Headers) -> int:
        return int(headers["x-kvgate-next-boundary-tokens"])

    context = text()
    first_key = stage.explain(chat_body(context))["chain"][0]["tokens"]
    cold = stage.chat(context)
    assert next_boundary(cold.response.headers) == first_key
    stage.until_resident(chat_body(context), prompt_tokens=cold.prompt_tokens)
    longer = stage.chat(context + text())
    assert longer.matched_tokens < next_boundary(longer.response.headers) < longer.prompt_tokens
    # No key lies between the two counts: the gateway cannot know more exactly how much the engine had.
    assert longer.matched_tokens <= longer.cached_tokens <= next_boundary(longer.response.headers) + 16
    again = stage.chat(context)
    assert again.matched_tokens <= next_boundary(again.response.headers)


@pytest.mark.parametrize("cluster", ["stage", "unfollowed"])
def test_no_more_is_said_to_be_matched_than_an_engine_can_serve(cluster: str, request: pytest.FixtureRequest) -> None:
    """vLLM serves whole blocks, and always computes a prompt's last token. Answers fill blocks too, but those blocks
    do not serve the same prompt again."""
    stage: Stage = request.getfixturevalue(cluster)
    seen = set()
    for size in range(1500, 1580, 4):
        context = text(size)
        for turn, max_tokens in enumerate((40, 70, 1, 40)):
            answer = stage.chat(context, gateway=turn % len(stage.gateways), max_tokens=max_tokens, temperature=0)
            seen.add(answer.prompt_tokens % 16)
            assert answer.matched_tokens <= (answer.prompt_tokens - 1) // 16 * 16
            assert turn == 0 or answer.matched_tokens > 0
    assert 0 in seen
    assert len(seen) > 8


def test_a_refusal_by_a_replica_says_which_one(stage: Stage) -> None:
    answer = stage.post("/v1/chat/completions", chat_body(text(50), max_tokens=-1))
    assert answer.status_code == 400
    assert answer.headers["x-kvgate-replica"] in {"r0", "r1", "r2"}
