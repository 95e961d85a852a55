"""Fields in which vLLM would trust a client never reach a replica, in any spelling."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.request.reader import TRUSTED_FIELDS
from tests.api.stage import Stage, bearer, chat_body, text, user
from tests.gateway.simulator.pictures import data_url, image_part

FORGED: dict[str, Any] = {
    "session_id": "forged",
    "request_id": "forged",
    "vllm_xargs": {"kv_cache_report_mode": "full", "session_id": "forged"},
    "kv_transfer_params": {"do_remote_prefill": True},
    "ec_transfer_params": {"do_remote_encode": True},
    "priority": -100,
}


def tip_of(stage: Stage, body: dict[str, Any]) -> str:
    return str(stage.explain(body)["chain"][-1]["key"])


def test_every_field_that_is_taken_out_is_tried_here() -> None:
    assert FORGED.keys() == {*TRUSTED_FIELDS, "priority"}


@pytest.mark.parametrize("field", list(FORGED))
def test_a_trusted_field_is_taken_out(stage: Stage, field: str) -> None:
    body = chat_body(text(100))
    answer = stage.post("/v1/chat/completions", {**body, field: FORGED[field]})
    assert answer.status_code == 200
    seen = stage.seen(answer)
    assert field not in seen["body_keys"]
    assert seen["session_id"] == tip_of(stage, body)
    assert seen["vllm_xargs"] == {}


@pytest.mark.parametrize("field", list(FORGED))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/tokenize"])
def test_it_is_taken_out_of_every_apis_bodies(stage: Stage, path: str, field: str) -> None:
    prompt = text(100)
    body = {
        "model": "sim",
        "prompt": prompt,
        "input": prompt,
        "query": prompt,
        "documents": ["a"],
        field: FORGED[field],
    }
    answer = stage.post(path, body)
    assert answer.status_code == 200
    if path != "/tokenize":  # it computes nothing, so the replica does not record it
        assert field not in stage.seen(answer)["body_keys"]


@pytest.mark.parametrize(
    "head",
    [
        '{"\\u0073ession_id":"forged",',
        '{"session_id":"one","session_id":"two",',
        '{"\\u0073\\u0065ssion_id":"one","session_id":"two","priority":1,"\\u0070riority":2,',
        ' \r\n\t{ "session_id" : "forged" ,',
        '{"session_id":null,"vllm_xargs":{"session_id":"forged"},',
    ],
)
def test_escapes_and_duplicates_hide_nothing(stage: Stage, head: str) -> None:
    body = chat_body(text(100))
    content = head + json.dumps(body)[1:]
    answer = stage.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    seen = stage.seen(answer)
    assert seen["session_id"] == tip_of(stage, body)
    assert {"session_id", "vllm_xargs", "priority"}.isdisjoint(seen["body_keys"])


def test_trusted_headers_are_dropped_or_replaced(stage: Stage) -> None:
    body = chat_body(text(100))
    forged = {"X-Session-ID": "forged", "X-data-parallel-rank": "7", "X-Vllm-Priority": "-100"}
    answer = stage.post("/v1/chat/completions", body, headers=forged)
    assert answer.status_code == 200
    headers = stage.seen(answer)["headers"]
    assert set(headers) == {"X-Session-ID", "X-Request-Id"}
    assert headers["X-Session-ID"] == tip_of(stage, body)


def test_an_images_id_is_the_gateways_own(stage: Stage) -> None:
    for content in (
        [image_part(70, uuid="forged")],
        [{"type": "image_url", "image_url": {"url": "https://pictures.example/a.png"}, "\u0075uid": "forged"}],
        [{"type": "text", "text": "x", "uuid": "forged"}, image_part(70)],
    ):
        answer = stage.post("/v1/chat/completions", chat_body(content))
        assert answer.status_code == 200
        assert "forged" not in stage.seen(answer)["image_ids"]


def test_one_image_cannot_pass_for_another(stage: Stage) -> None:
    before = {"type": "text", "text": text(400)}
    shown = stage.chat([before, image_part(71, uuid="same", size=(640, 640))])
    other = stage.chat([before, image_part(72, uuid="same", size=(640, 640))])
    assert other.cached_tokens < 200 < shown.prompt_tokens


def test_an_id_without_its_image_is_refused(stage: Stage) -> None:
    known = stage.seen(stage.chat([image_part(73)]).response)["image_ids"][0]
    for part in (
        {"type": "image_url", "uuid": known},
        {"type": "image_url", "image_url": None, "uuid": known},
        {"type": "image_url", "image_url": {}, "uuid": known},
        {"type": "image_url", "image_url": {"url": None}, "uuid": known},
    ):
        assert stage.post("/v1/chat/completions", chat_body([part])).status_code == 400


@pytest.mark.parametrize(
    ("path", "wrap"),
    [
        ("/v1/responses", lambda part: {"input": [{"role": "user", "content": [part]}]}),
        ("/v1/embeddings", lambda part: {"messages": user([part])}),
        ("/tokenize", lambda part: {"messages": user([part])}),
        ("/v1/messages/count_tokens", lambda part: {"messages": user([part])}),
    ],
)
def test_no_api_takes_a_clients_image_id(mixed: Stage, path: str, wrap: Any) -> None:
    """The only replica of model `b` remembers an image under every id that it receives."""
    uuid = f"forged for {path}"
    part = {"type": "image_url", "image_url": {"url": data_url(74)}, "uuid": uuid}
    assert mixed.post(path, {"model": "b", **wrap(part)}).status_code == 200
    direct = chat_body([{"type": "image_url", "image_url": None, "uuid": uuid}], model="b")
    assert mixed.http.post(f"{mixed.sims[2].url}/v1/chat/completions", json=direct).status_code == 400


def test_priority_passes_where_the_configuration_allows_it(sharing: Stage) -> None:
    answer = sharing.post("/v1/chat/completions", chat_body(text(50), priority=3), headers=bearer("alice"))
    assert "priority" in sharing.seen(answer)["body_keys"]
