"""APIs without a method in the SDK, and paths that the gateway does not know."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.stage import Stage, chat_body, error_of, fresh, text, user

FORM = {"model": "sim", "language": "en"}
SOUND = {"file": ("speech.wav", b"RIFF\0\0\r\n--not-a-boundary", "audio/wav")}


def test_anthropics_messages_are_answered(stage: Stage) -> None:
    body = {"model": "sim", "max_tokens": 5, "system": text(300), "messages": user("Hello")}
    answer = stage.post("/v1/messages", body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200
    message = answer.json()
    assert message["type"] == "message"
    assert message["content"][0]["text"]
    assert answer.headers["x-kvgate-decision"].startswith("cold")


def test_a_stream_of_messages_ends_as_anthropic_says(stage: Stage) -> None:
    answer = stage.post("/v1/messages", {"model": "sim", "max_tokens": 5, "messages": user("Hello"), "stream": True})
    events = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert (events[0], events[-1]) == ("message_start", "message_stop")


def test_a_replicas_refusal_keeps_anthropics_shape(stage: Stage) -> None:
    answer = stage.post("/v1/messages", {"model": "sim", "messages": user("Hello"), "max_tokens": 1, "temperature": 9})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_the_gateways_own_refusals_have_anthropics_shape_on_anthropics_paths(stage: Stage, path: str) -> None:
    unknown = stage.post(path, {"model": fresh("nonesuch"), "messages": user("Hello"), "max_tokens": 2})
    error = error_of(unknown)
    assert (unknown.status_code, error["type"]) == (404, "not_found_error")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    broken = stage.post(path, content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, error_of(broken)["type"]) == (400, "invalid_request_error")


def test_every_answer_on_anthropics_paths_has_a_request_id(stage: Stage) -> None:
    body = {"model": "sim", "messages": user("Hello")}
    headers = {"x-request-id": "named-by-the-client"}
    answered = stage.post("/v1/messages", {**body, "max_tokens": 2}, headers=headers)
    streamed = stage.post("/v1/messages", {**body, "max_tokens": 2, "stream": True}, headers=headers)
    refused_by_the_replica = stage.post("/v1/messages", body, headers=headers)
    counted = stage.post("/v1/messages/count_tokens", body, headers=headers)
    answers = (answered, streamed, refused_by_the_replica, counted)
    assert [answer.status_code for answer in answers] == [200, 200, 400, 200]
    for answer in answers:
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == "named-by-the-client"
    assert "request-id" not in stage.chat("Hello").response.headers


def test_a_prompt_is_tokenized_and_back(stage: Stage) -> None:
    prompt = text(200)
    tokens = stage.post("/tokenize", {"model": "sim", "prompt": prompt}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 50
    assert stage.post("/detokenize", {"model": "sim", "tokens": tokens["tokens"]}).json() == {"prompt": prompt}


def test_the_only_model_need_not_be_named_to_tokenize(stage: Stage, mixed: Stage) -> None:
    assert stage.post("/tokenize", {"messages": user("Hello")}).json()["count"] > 0
    assert stage.post("/tokenize", {"prompt": "Hello"}).json()["count"] == 2
    several = mixed.post("/tokenize", {"prompt": "Hello"})
    assert (several.status_code, error_of(several)["param"]) == (400, "model")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_are_ranked(stage: Stage, path: str) -> None:
    body = {"model": "sim", "query": "What?", "documents": [text(100), text(100), text(100)], "top_n": 2}
    assert len(stage.post(path, body).json()["results"]) == 2


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_pairs_are_scored(stage: Stage, path: str) -> None:
    answer = stage.post(path, {"model": "sim", "text_1": "What?", "text_2": [text(100), text(100)]})
    assert len(answer.json()["data"]) == 2


def test_what_is_read_again_comes_back_to_its_replica_on_every_path(stage: Stage) -> None:
    bodies: dict[str, Any] = {
        "/v1/completions": {"prompt": text()},
        "/v1/embeddings": {"input": text()},
        "/v1/responses": {"input": text()},
        "/v1/messages": {"messages": user(text()), "max_tokens": 2},
        "/v1/rerank": {"query": text(), "documents": ["one", "two"]},
        "/v1/score": {"text_1": text(), "text_2": "one"},
    }
    for path, body in bodies.items():
        first = stage.post(path, {"model": "sim", **body})
        again = stage.post(path, {"model": "sim", **body}, gateway=1)
        assert again.status_code == 200, again.text
        assert again.headers["x-kvgate-replica"] == first.headers["x-kvgate-replica"], path
        assert again.headers["x-kvgate-decision"].startswith("hit"), path
        assert int(again.headers["x-kvgate-matched-tokens"]) > 500, path


def test_messages_and_chat_share_the_prefix_of_one_conversation(stage: Stage) -> None:
    system = text()
    body = {"model": "sim", "max_tokens": 2, "system": system, "messages": user("One")}
    first = stage.post("/v1/messages", body)
    chat = [{"role": "system", "content": system}, *user("Two")]
    again = stage.post("/v1/chat/completions", {"model": "sim", "max_tokens": 2, "messages": chat}, gateway=1)
    assert again.headers["x-kvgate-replica"] == first.headers["x-kvgate-replica"]
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 900


def test_an_unknown_path_reaches_a_replica_whatever_it_answers(stage: Stage) -> None:
    answer = stage.post("/v1/nonesuch/deeper", {"model": "sim"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == 404  # the replica's own shape
    assert answer.headers["x-kvgate-replica"] in {"r0", "r1", "r2"}
    assert stage.get("/v1/nonesuch?a=b%20c").headers["x-kvgate-replica"]


def test_an_upload_reaches_a_replica_that_serves_its_model(stage: Stage, mixed: Stage) -> None:
    answer = stage.post("/v1/audio/transcriptions", files=SOUND, data=FORM)
    assert answer.status_code == 404
    assert answer.headers["x-kvgate-replica"] in {"r0", "r1", "r2"}
    assert mixed.post("/v1/audio/transcriptions", files=SOUND, data={"model": "b"}).headers["x-kvgate-replica"] == "m2"
    unknown = stage.post("/v1/audio/transcriptions", files=SOUND, data={"model": fresh("nonesuch")})
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b"--x--\r\n"),
        ("multipart/form-data; boundary=x", b"hello"),
        ("multipart/form-data; boundary=x", b"--x\r\nno head at all\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data; no=a\r\n\r\n1\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nnever ends'),
    ],
)
def test_an_upload_that_is_no_form_is_refused(stage: Stage, content_type: str, body: bytes) -> None:
    answer = stage.post("/v1/audio/transcriptions", content=body, headers={"content-type": content_type})
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "invalid_form"
    assert error_of(answer)["param"] in ("body", "content-type")


@pytest.mark.parametrize("status", [400, 404, 409, 422])
def test_a_replicas_error_passes_with_status_and_body(stage: Stage, status: int) -> None:
    with stage.failing("error", status=status):
        answer = stage.post("/v1/chat/completions", chat_body("x"))
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == f"Simulated failure with status {status}"


def test_a_replicas_overload_passes_once_all_have_refused(stage: Stage) -> None:
    seen = stage.requests_seen()
    with stage.failing("error", status=429):
        answer = stage.post("/v1/chat/completions", chat_body("x"))
    assert answer.status_code == 429
    assert answer.json()["error"]["message"] == "Simulated failure with status 429"
    assert stage.requests_seen() - seen == 3
