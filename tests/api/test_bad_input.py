"""Bad input always gets a 4xx in OpenAI's shape that names the error, and the gateway keeps serving."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import pytest

from tests.api.stage import Stage, chat_body, error_of, fresh, text, user


def png(width: int, height: int) -> str:
    """A data: URL of a tiny PNG that declares this size and contains a few compressed zeros."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(bytes(10_000))
    chunks = b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in (header, pixels)
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def picture(url: Any) -> list[Any]:
    return user([{"type": "image_url", "image_url": {"url": url}}])


CHAT: dict[str, tuple[Any, str]] = {
    "no messages": ({"model": "sim"}, "messages"),
    "null messages": ({"model": "sim", "messages": None}, "messages"),
    "messages as an object": ({"model": "sim", "messages": {}}, "messages"),
    "a message that is text": ({"model": "sim", "messages": ["hi"]}, "messages[0]"),
    "a message that is null": ({"model": "sim", "messages": [*user("x"), None]}, "messages[1]"),
    "no role": ({"model": "sim", "messages": [{"content": "x"}]}, "messages[0].role"),
    "a number for a role": ({"model": "sim", "messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    "a number for content": ({"model": "sim", "messages": user(5)}, "messages[0].content"),
    "content as an object": ({"model": "sim", "messages": user({})}, "messages[0].content"),
    "a part that is a number": ({"model": "sim", "messages": user([5])}, "messages[0].content[0]"),
    "a part without a type": ({"model": "sim", "messages": user([{}])}, "messages[0].content[0].type"),
    "a text part of numbers": (
        {"model": "sim", "messages": user([{"type": "text", "text": 5}])},
        "messages[0].content[0].text",
    ),
    "a name that is a list": (
        {"model": "sim", "messages": [{"role": "user", "content": "x", "name": []}]},
        "messages[0].name",
    ),
    "tool calls as text": (
        {"model": "sim", "messages": [{"role": "assistant", "tool_calls": "x"}]},
        "messages[0].tool_calls",
    ),
    "a call without a function": (
        {"model": "sim", "messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    "tools as text": ({"model": "sim", "messages": user("x"), "tools": "x"}, "tools"),
    "a tool that is text": ({"model": "sim", "messages": user("x"), "tools": ["x"]}, "tools[0]"),
    "a salt that is a number": ({"model": "sim", "messages": user("x"), "cache_salt": 5}, "cache_salt"),
    "an empty salt": ({"model": "sim", "messages": user("x"), "cache_salt": ""}, "cache_salt"),
    "a list for a model": ({"model": ["sim"], "messages": user("x")}, "model"),
    "nesting that no engine takes": (
        {"model": "sim", "messages": user("x"), "chat_template_kwargs": json.loads("[" * 600 + "]" * 600)},
        "body",
    ),
    "broken base64": (
        {"model": "sim", "messages": picture("data:image/png;base64,!!!")},
        "messages[0].content[0].image_url.url",
    ),
    "base64 cut off": (
        {"model": "sim", "messages": picture("data:image/png;base64,aGVsbG8")},
        "messages[0].content[0].image_url.url",
    ),
    "a data: URL without data": (
        {"model": "sim", "messages": picture("data:image/png")},
        "messages[0].content[0].image_url.url",
    ),
    "an image by a file's name": (
        {"model": "sim", "messages": picture("file:///etc/passwd")},
        "messages[0].content[0].image_url.url",
    ),
    "a number for an image": (
        {"model": "sim", "messages": picture(7)},
        "messages[0].content[0].image_url.url",
    ),
    "a decompression bomb": (
        {"model": "sim", "messages": picture(png(60_000, 60_000))},
        "messages[0].content[0].image_url.url",
    ),
}

OTHER: dict[str, tuple[str, Any, str]] = {
    "completions without a prompt": ("/v1/completions", {}, "prompt"),
    "an object for a prompt": ("/v1/completions", {"prompt": {}}, "prompt"),
    "an empty prompt list": ("/v1/completions", {"prompt": []}, "prompt"),
    "negative token ids": ("/v1/completions", {"prompt": [-1]}, "prompt"),
    "huge token ids": ("/v1/completions", {"prompt": [2**40]}, "prompt"),
    "fractions for token ids": ("/v1/completions", {"prompt": [1.5]}, "prompt"),
    "embeddings of nothing": ("/v1/embeddings", {}, "input"),
    "embeddings of an object": ("/v1/embeddings", {"input": {}}, "input"),
    "a response to a number": ("/v1/responses", {"input": 5}, "input"),
    "a response to a list of numbers": ("/v1/responses", {"input": [5]}, "input[0]"),
    "a response after a number": ("/v1/responses", {"input": "x", "previous_response_id": 5}, "previous_response_id"),
    "messages as text": ("/v1/messages", {"messages": "x"}, "messages"),
    "an image without a source": (
        "/v1/messages",
        {"messages": user([{"type": "image"}])},
        "messages[0].content[0].source",
    ),
    "an image of no data": (
        "/v1/messages",
        {"messages": user([{"type": "image", "source": {"type": "base64"}}])},
        "messages[0].content[0].source.data",
    ),
    "a system prompt of numbers": ("/v1/messages", {"system": 5, "messages": user("x")}, "system"),
    "nothing to tokenize": ("/tokenize", {}, "prompt"),
    "a rank without a query": ("/v1/rerank", {"documents": ["x"]}, "query"),
    "a score of numbers": ("/v1/score", {"text_1": 5, "text_2": "x"}, "text_1"),
}


def post_raw(stage: Stage, path: str, body: bytes, **headers: str) -> Any:
    return stage.post(path, content=body, headers={"content-type": "application/json", **headers})


@pytest.fixture(autouse=True)
def the_gateway_goes_on(stage: Stage) -> Any:
    """After each test, the gateway still serves the next request."""
    yield
    assert stage.chat(text(50)).response.status_code == 200


@pytest.mark.parametrize("body", [b"[]", b"[" * 100, b'{"model":"sim","input":"\xff\xfe"}', b'{"model":"sim",'])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/tokenize", "/v1/nonesuch"]
)
def test_a_body_that_is_no_json_object_is_refused(stage: Stage, path: str, body: bytes) -> None:
    answer = post_raw(stage, path, body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["code"], error["param"], error["type"]) == ("invalid_json", "body", "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/score"])
def test_a_prompt_needs_a_body(stage: Stage, path: str) -> None:
    answer = stage.post(path)
    assert answer.status_code == 400
    assert (error_of(answer)["code"], error_of(answer)["param"]) == ("invalid_json", "body")


@pytest.mark.parametrize("name", list(CHAT))
def test_a_bad_field_of_a_chat_is_named(stage: Stage, name: str) -> None:
    body, param = CHAT[name]
    answer = stage.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert param in error_of(answer)["message"]


@pytest.mark.parametrize("name", list(OTHER))
def test_a_bad_field_of_another_api_is_named(stage: Stage, name: str) -> None:
    path, body, param = OTHER[name]
    answer = stage.post(path, {"model": "sim", **body})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize("name", ["nonesuch", "", "sim\u0000", "x" * 10_000, "../sim", "{sim}"])
def test_an_unknown_model_is_a_404_and_leaves_no_trace(stage: Stage, name: str) -> None:
    answer = stage.post("/v1/chat/completions", chat_body("x", model=name))
    assert answer.status_code == 404
    assert (error_of(answer)["code"], error_of(answer)["param"]) == ("model_not_found", "model")
    assert len(error_of(answer)["message"]) < 250


def test_of_duplicate_keys_the_last_wins(stage: Stage) -> None:
    body = b'{"model":"nonesuch","messages":[],"model":"sim","max_tokens":3,"messages":[{"role":"user","content":"x"}]}'
    answer = post_raw(stage, "/v1/chat/completions", body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": user("x")}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
def test_without_a_model_the_only_one_is_meant(stage: Stage, path: str, body: dict[str, Any]) -> None:
    for named in ({}, {"model": None}):
        answer = stage.post(path, {**body, **named})
        assert answer.is_success, answer.text


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip"])
def test_a_compressed_body_is_refused(stage: Stage, encoding: str) -> None:
    answer = post_raw(stage, "/v1/chat/completions", b"\x1f\x8b", **{"content-encoding": encoding})
    assert answer.status_code == 415
    assert (error_of(answer)["code"], error_of(answer)["param"]) == ("unsupported_encoding", "content-encoding")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/nonesuch", 404, "not_found"),
        ("POST", "/v2/chat/completions", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/metrics", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/route/explain", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/tokenize", 405, "method_not_allowed"),
        ("GET", "/docs", 404, "path_not_allowed"),
        ("POST", "/openapi.json", 405, "method_not_allowed"),
    ],
)
def test_unknown_paths_and_wrong_methods_are_refused_in_the_same_shape(
    stage: Stage, method: str, path: str, status: int, code: str
) -> None:
    answer = stage.send(method, path)
    assert answer.status_code == status
    assert error_of(answer)["code"] == code
    assert (status == 405) == ("allow" in answer.headers)


def test_long_and_odd_values_are_no_gateways_fault(stage: Stage) -> None:
    for value in (True, -1, 1.5, "x" * 1000, [], {}, 10**30):
        for name in ("stream", "stream_options", "max_tokens", "n", "tool_choice", "temperature", fresh("field")):
            answer = stage.post("/v1/chat/completions", chat_body("x", **{name: value}))
            assert answer.status_code in (200, 400), (name, value, answer.text)
