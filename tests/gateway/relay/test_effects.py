"""A request that may have effects beyond its answer runs at most once. Other requests are retried on another
replica, unless it would give the same answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.endpoints import endpoint_of
from gateway.request.paths import may_have_effects
from tests.gateway.relay.conftest import Pair
from tests.gateway.scripted import ASKED, CHAT, whole

RESPONSES = "/v1/responses"
FUNCTION = {"type": "function", "name": "f", "parameters": {}}
# Too many items to read in this process: a worker process reads them.
LARGE = [{"role": "user", "content": "Hello"}] * 4000


def response(**fields: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"model": "m", "input": "Hello", **fields}


WITH_EFFECTS = {
    "background": response(background=True),
    "background in another word": response(background="yes"),
    "stored": response(store=True),
    "streamed": response(store=True, stream=True),
    "read by another process": response(store=True, input=LARGE),
    "tools of the server": response(tools=[FUNCTION, {"type": "web_search_preview"}]),
    "an mcp server": response(tools=[{"type": "mcp", "server_label": "x"}]),
    "tools of no type": response(tools=[{"type": ["function"]}]),
    "a path that nobody knows": ("/v1/jobs", {"model": "m"}),
    "of Anthropic's": ("/v1/messages/batches", {"requests": []}),
}
COMPUTED = {
    "a chat": (CHAT, ASKED),
    "a response": response(),
    "not stored": response(store=False, background=False, tools=None),
    "tools of the client": response(tools=[FUNCTION, {"type": "custom", "name": "c"}]),
    "a chat whose store nobody looks at": (CHAT, {**ASKED, "store": True}),
    "a token count": ("/v1/messages/count_tokens", ASKED),
    "an embedding": ("/v1/embeddings", {"model": "m", "input": "Hello"}),
}


@pytest.mark.parametrize(("path", "body"), WITH_EFFECTS.values(), ids=WITH_EFFECTS)
async def test_what_has_effects_is_not_sent_elsewhere_when_its_replica_gave_no_answer(
    pair: Pair, path: str, body: dict[str, Any]
) -> None:
    pair.say()
    answer = await pair.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], pair.asked) == (502, "maybe_executed", 1)
    assert answer.headers["x-should-retry"] == "false"
    if path.startswith("/v1/messages"):
        assert (answer.json()["type"], error["type"]) == ("error", "api_error")
    else:
        assert error["type"] == "server_error"


@pytest.mark.parametrize(("path", "body"), COMPUTED.values(), ids=COMPUTED)
async def test_what_only_computes_an_answer_is(pair: Pair, path: str, body: dict[str, Any]) -> None:
    pair.say()
    answer = await pair.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"], pair.asked) == (502, "replica_unreachable", 2)
    assert "x-should-retry" not in answer.headers


@pytest.mark.parametrize(
    ("method", "path", "may"),
    [
        ("POST", "/v1/files", True),
        ("PUT", "/v1/files", True),
        ("PATCH", "/v1/files", True),
        ("DELETE", "/v1/files", True),
        ("GET", "/v1/files", False),
        ("HEAD", "/v1/files", False),
        ("OPTIONS", "/v1/files", False),
        ("POST", "/v1/responses/resp_1/cancel", True),
        ("POST", "/v1/audio/transcriptions", False),
        ("POST", "/v1/rerank", False),
        ("POST", "/tokenize", False),
        ("POST", "/detokenize", False),
        ("POST", "/v1/chat/completions/batch", False),
        ("POST", "/V1/chat/completions", True),
    ],
)
def test_what_a_path_that_nobody_knows_does_with_anything_but_a_read_may_have_effects(
    method: str, path: str, may: bool
) -> None:
    assert may_have_effects(method, endpoint_of(path)) == may


@pytest.mark.parametrize(("status", "asked"), [(429, 2), (503, 2), (500, 1), (502, 1), (504, 1), (404, 1)])
async def test_only_after_a_429_or_503_is_another_replica_asked_and_what_was_answered_passes_through(
    pair: Pair, status: int, asked: int
) -> None:
    pair.say(whole(b'{"error":{"message":"mine"}}', status=status))
    path, body = response(background=True)
    answer = await pair.http.post(path, json=body)
    assert (answer.status_code, answer.json(), pair.asked) == (status, {"error": {"message": "mine"}}, asked)


async def test_a_refusal_before_does_not_hide_that_it_may_have_been_executed_then(pair: Pair) -> None:
    """If the client got the first replica's 503, it would send the request again."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        if pair.asked == 1:
            writer.write(whole(b"{}", status=503))

    for replica in pair.replicas:
        replica.answer = answer
    path, body = response(background=True)
    refused = await pair.http.post(path, json=body)
    assert (refused.json()["error"]["code"], pair.asked) == ("maybe_executed", 2)


async def test_a_streamed_response_with_effects_that_is_never_begun_is_not_sent_elsewhere(pair: Pair) -> None:
    pair.say(asyncio.Event())
    path, body = response(store=True, stream=True)
    answer = await pair.http.post(path, json=body)
    assert (answer.json()["error"]["code"], "(timeout)" in answer.text, pair.asked) == ("maybe_executed", True, 1)


async def test_an_answer_whose_head_is_too_large_is_refused_to_its_client_and_held_against_no_replica(
    pair: Pair,
) -> None:
    pair.say(whole(b"{}", "metadata: " + "m" * 2**20))
    for asked in (1, 2, 3, 4):
        answer = await pair.http.post("/v1/embeddings", json={"model": "m", "input": "Hello"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "answer_head_too_large")
        assert (answer.headers["x-should-retry"], pair.asked) == ("false", asked)
    pair.say(whole(b"{}"))
    chat = await pair.http.post(CHAT, json=ASKED)
    assert (chat.status_code, "last_resort" in chat.headers["x-kvgate-decision"]) == (200, False)
