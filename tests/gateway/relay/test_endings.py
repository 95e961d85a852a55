"""What an answer says of its own end."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.endpoints import endpoint_of
from gateway.relay.endings import (
    may_be_unfinished,
    may_open,
    opens,
    says_no_end,
    unfinished,
)


def choices(*reasons: Any) -> dict[str, Any]:
    return {"choices": [{"index": at, "finish_reason": reason} for at, reason in enumerate(reasons)]}


def response(status: str, **fields: Any) -> dict[str, Any]:
    return {"object": "response", "status": status, "output": [{}], "usage": {"output_tokens": 3}, **fields}


def delta(**fields: Any) -> dict[str, Any]:
    return {"type": "message_delta", "delta": fields}


VECTOR = {"object": "embedding", "embedding": [0.5]}
COMPLETE = [
    *(choices(each) for each in ("stop", "length", "tool_calls", "function_call", "content_filter", "repetition")),
    choices(None),
    choices("a reason that vLLM 0.40 may invent"),
    choices("stop", None, "length"),
    {"choices": [], "usage": {}},
    {"choices": [{"finish_reason": "stop", "message": {"content": '{"finish_reason":"abort"}', "error": {}}}]},
    {"error": None, "choices": []},
    delta(stop_reason="end_turn"),
    delta(stop_reason="refusal"),
    {"type": "message_start", "message": {"type": "message", "stop_reason": None}},
    {"type": "message", "stop_reason": "max_tokens"},
    response("completed", error=None, tools=[{"parameters": {"error": {"type": "object"}}}]),
    response("queued", usage=None, output=[]),
    response("incomplete", incomplete_details={"reason": "max_output_tokens"}),
    {"type": "response.completed", "response": response("completed")},
    {"object": "list", "data": [VECTOR, VECTOR]},
    {"object": "list", "data": [{"object": "score", "score": 0}]},
    {},
]
ABORTED = [
    choices("abort"),
    choices("stop", "abort"),
    choices("error"),
    choices("cancelled"),
    delta(stop_reason=None, stop_sequence=None),
    {"type": "message", "stop_reason": None},
    response("cancelled"),
    response("failed"),
    response("completed", output=[], usage={"output_tokens": 0}),
    response("incomplete", incomplete_details={"reason": "interrupted"}),
    {"type": "response.completed", "response": response("cancelled")},
    {"type": "response.cancelled", "response": response("cancelled")},
    {"object": "list", "data": [VECTOR, {"object": "embedding", "embedding": []}]},
    {"object": "list", "data": [{"object": "embedding", "embedding": ""}]},
]
ERRORS: list[tuple[dict[str, Any], int]] = [
    ({"error": {"message": "dead", "type": "InternalServerError", "code": 500}}, 500),
    ({"error": {"message": "paused", "type": "ServiceUnavailableError", "code": 503}}, 503),
    ({"error": {"message": "dead"}}, 500),
    ({"error": "dead"}, 500),
    ({"object": "error", "message": "dead", "type": "InternalServerError", "code": 500}, 500),
    ({"type": "error", "error": {"type": "overloaded_error", "message": "later"}}, 500),
    ({"type": "error", "error": {"type": "rate_limit_error", "message": "later"}}, 429),
    ({"type": "response.failed", "response": response("failed", error={"code": "server_error"})}, 500),
    ({"type": "error", "code": "server_error", "message": "dead"}, 500),
]
REFUSALS: list[tuple[dict[str, Any], int]] = [
    ({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, 400),
    ({"error": {"message": "too long", "code": "404"}}, 404),
    ({"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}, 400),
    ({"type": "error", "code": "context_length_exceeded", "message": "too long"}, 400),
    ({"type": "response.failed", "response": response("failed", error={"code": "invalid_prompt"})}, 400),
]


@pytest.mark.parametrize("document", COMPLETE, ids=str)
def test_an_answer_that_ended_by_itself_or_goes_on_is_not_unfinished(document: dict[str, Any]) -> None:
    assert unfinished(document) is None


@pytest.mark.parametrize("document", ABORTED, ids=str)
def test_an_answer_that_its_engine_aborted_is_unfinished(document: dict[str, Any]) -> None:
    found = unfinished(document)
    assert found is not None
    assert (found.reason, found.is_requests_fault) == ("aborted", False)


@pytest.mark.parametrize("document", [*ABORTED, *(error for error, _ in ERRORS + REFUSALS)], ids=str)
def test_an_event_that_says_so_is_read(document: dict[str, Any]) -> None:
    """By its words: the others are not parsed."""
    kind = str(document.get("type") or document.get("object") or "")
    paths = {"response": "responses", "message": "messages", "error": "messages"}
    path = next((path for start, path in paths.items() if kind.startswith(start)), "chat/completions")
    event = b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document))
    is_streamed = kind not in ("list", "message", "response")
    assert not is_streamed or may_be_unfinished(event, endpoint_of(f"/v1/{path}").ending_words)


@pytest.mark.parametrize(("document", "status"), [*ERRORS, *REFUSALS], ids=str)
def test_an_error_counts_by_the_status_that_it_stands_for(document: dict[str, Any], status: int) -> None:
    found = unfinished(document)
    assert found is not None
    assert (found.reason, found.status) == ("error_event", status)
    assert found.is_requests_fault == (document in [each for each, _ in REFUSALS])


def test_a_response_that_its_client_cancelled_has_ended() -> None:
    event = {"type": "response.cancelled", "response": response("cancelled")}
    assert unfinished(event, may_be_cancelled=True) is None
    assert unfinished({**event, "type": "response.completed"}, may_be_cancelled=True) is not None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"index":0,"finish_reason":"abort"}', True),
        (b'{"finish_reason" : "error"}', True),
        (b'{"finish_reason":"stop"}', False),
        (b'{"finish_reason":"abort later"}', False),
        (b'{"text":"\\"finish_reason\\":\\"abort\\""}', False),
    ],
)
def test_in_an_answer_that_is_not_parsed_text_cannot_imitate_a_finish_reason(data: bytes, says: bool) -> None:
    assert says_no_end(data) == says


def test_events_without_any_token_only_announce_an_answer() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    for first in (role, {"type": "message_start"}):
        assert may_open(orjson.dumps(first))
        assert opens(first)
    for more in (
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {"role": "assistant", "content": "a"}}]},
        {"choices": [{"delta": {"role": "assistant"}, "finish_reason": "abort"}]},
        {"choices": [], "usage": {}},
        {"type": "content_block_start"},
    ):
        assert not opens(more)
