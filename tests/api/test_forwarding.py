"""The bytes that the gateway sends to a replica. An echo server returns them. (It is not vLLM, and has no metrics.)"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster
from tests.api.conftest import GUARDED
from tests.api.echo import MODEL, OBEYED_HEADERS, running_echo, sent
from tests.api.stage import Stage, bearer, error_of, fresh, running_gateway, user
from tests.gateway.simulator.pictures import data_url

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
AUDIO = "/v1/audio/transcriptions"
SOUND = {"file": ("a \u00e9.wav", bytes(range(256)), "audio/wav")}
OWN_HEADERS = {"host", "accept", "content-type", "content-length", "x-request-id", "x-session-id"}


@pytest.fixture(scope="module")
def echo(open_cluster: Cluster, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A gateway without keys."""
    folder, config = tmp_path_factory.mktemp("echo"), {"security": {"allowed_paths": ["/v1/"]}}
    with running_echo("echo") as replica, running_gateway(folder, open_cluster.redis_url, [replica], config) as url:
        yield Stage([url], [replica], http)


@pytest.fixture(scope="module")
def guarded_echo(echo: Stage, open_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A gateway with keys. Requests use alice's key unless a test gives another."""
    config = {"security": GUARDED["security"]}
    with running_gateway(tmp_path_factory.mktemp("guarded"), open_cluster.redis_url, echo.sims, config) as url:
        yield replace(echo, gateways=[url], headers=bearer("alice"))


def test_a_server_that_is_not_vllm_is_fronted_all_the_same(echo: Stage) -> None:
    assert echo.get("/v1/models").json()["data"] == [{"id": MODEL, "object": "model"}]
    assert echo.get("/ready").json()["replicas"] == ["echo"]


def test_a_body_that_needs_no_change_travels_as_it_came(echo: Stage) -> None:
    body = b' {"model" : "echo",\r\n "temperature":1.50, "messages":[{"role":"user","content":"\\u00e9\xc3\xa9"}]}\n'
    assert sent(echo.post(CHAT, content=body, headers=JSON)).body == body


@pytest.mark.parametrize(
    ("path", "wrap"),
    [
        ("/v1/score", lambda part: {"queries": "a", "documents": "b", "data_1": "a", "data_2": {"content": [part]}}),
        (
            "/v1/responses",
            lambda part: {"input": [{"type": "item_reference", "id": "item", "role": "user", "content": [part]}]},
        ),
    ],
)
def test_a_clients_image_id_is_dropped_where_only_vllm_sees_a_message(echo: Stage, path: str, wrap: Any) -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "uuid": "forged"}
    body = sent(echo.post(path, {"model": MODEL, **wrap(part)})).body
    assert b"data:image/png;base64,AAAA" in body
    assert b"forged" not in body


def test_headers_are_an_allow_list(echo: Stage) -> None:
    given = {"traceparent": "00-1-2-01", "tracestate": "a=b", "anthropic-version": "2023-06-01", "openai-beta": "x=1"}
    forged = {
        "x-session-id": "a",
        "x-data-parallel-rank": "1",
        "x-vllm-priority": "1",
        "cookie": "a=b",
        "te": "trailers",
    }
    forged |= {"x-forwarded-for": "1.2.3.4", "x-api-key": "theirs", "accept-encoding": "gzip", "user-agent": "me"}
    request = sent(echo.post(CHAT, {"model": MODEL, "messages": user(fresh())}, headers={**given, **forged}))
    assert set(request.headers) == OWN_HEADERS | set(given)
    assert request.headers["x-session-id"] != "a"
    assert {name: request.headers[name] for name in given} == given


def test_a_list_in_several_headers_is_passed_on_as_one(echo: Stage) -> None:
    lines = [("tracestate", "a=b"), ("tracestate", ""), ("tracestate", "c=d")]
    lines += [("anthropic-beta", "one"), ("Anthropic-Beta", "two,three")]
    lines += [("anthropic-version", "1"), ("anthropic-version", "2")]
    headers = [("content-type", "application/json"), *lines]
    body = json.dumps({"model": MODEL, "messages": user(fresh())}).encode()
    got = sent(httpx.post(f"{echo.gateways[0]}{CHAT}", content=body, headers=headers, timeout=20)).headers
    assert (got["tracestate"], got["anthropic-beta"]) == ("a=b, c=d", "one, two,three")
    assert got["anthropic-version"] == "2"


def test_of_a_replicas_headers_its_own_pass(echo: Stage) -> None:
    answer = echo.post(CHAT, {"model": MODEL, "messages": user(fresh())})
    assert answer.headers["x-of-the-replica"] == "kept"
    assert answer.headers["x-kvgate-replica"] == "echo"
    assert answer.headers.get_list("x-kvgate-decision") != ["forged"]
    assert len(answer.headers.get_list("x-request-id")) == 1
    assert len(answer.headers.get_list("date")) == 1
    assert not {"set-cookie", "server", *map(str.lower, OBEYED_HEADERS)} & set(answer.headers)


@pytest.mark.parametrize(
    ("asked", "target"),
    [
        ("/v1/any?a=%2F&b=c+d&e=%C3%A9", "/v1/any?a=%2F&b=c+d&e=%C3%A9"),
        ("/v1/caf%C3%A9%20au%20lait", "/v1/caf%C3%A9%20au%20lait"),
        ("/v1/a:b@c,d;e=f~g-h_i.j!", "/v1/a:b@c,d;e=f~g-h_i.j!"),
        ("/v1/%61ny%3Fthing%23", "/v1/any%3Fthing%23"),
        ("/v1/any?", "/v1/any"),
    ],
)
def test_path_and_query_arrive_as_they_were_judged(echo: Stage, asked: str, target: str) -> None:
    assert sent(echo.get(asked)).target == target


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/embeddings", "/classify"])
def test_a_json_body_carries_its_tenants_salt_and_not_the_clients(guarded_echo: Stage, path: str) -> None:
    def salt(name: str, **fields: Any) -> Any:
        body = {"model": MODEL, "prompt": "x", "input": "x", "messages": user("x"), **fields}
        request = sent(guarded_echo.post(path, body, headers=bearer(name)))
        assert "authorization" not in request.headers
        return request.json["cache_salt"]

    salts = [salt("alice"), salt("bob"), salt("alice", cache_salt="a"), salt("bob", cache_salt="a")]
    assert len(set(salts)) == 4
    assert all(len(one) == 64 for one in salts)
    assert salt("anna") == salts[0]
    assert salt("anna", cache_salt="a") == salts[2]


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/tokenize", "/v1/messages/count_tokens"])
def test_where_the_engine_knows_no_salt_the_body_gets_none(guarded_echo: Stage, path: str) -> None:
    """A server that refuses unknown fields would answer 422."""
    body = json.dumps({"model": MODEL, "prompt": "x", "messages": user("x")}).encode()
    headers = {**bearer("alice"), **JSON}
    assert sent(guarded_echo.post(path, content=body, headers=headers)).body == body


def test_beside_what_is_replaced_a_body_arrives_to_the_letter(echo: Stage) -> None:
    image = json.dumps(data_url(5))
    text = (
        '{"model": "echo", "seed": 123456789012345678901234567890, "top_p": 1.10, "user":"\\ud83d\\ude00","n":1,"n" : 1'
        ',"session_id":"forged", "stream": true, "stream_options": {"include_usage":false, "other": 1e2}, "messages":'
        ' [ {"role": "user", "content": [{"type":"image_url","uuid":"forged", "image_url": {"url": IMAGE}}]} ] }'
    ).replace("IMAGE", image)
    got = sent(echo.post(CHAT, content=text.encode(), headers=JSON)).body.decode()
    assert got.startswith(
        '{"model": "echo","seed": 123456789012345678901234567890,"top_p": 1.10,"user":"\\ud83d\\ude00","n":1,"n" : 1,'
        '"stream": true,"messages": [{"role": "user","content": [{"type":"image_url","image_url": {"url": '
        + image
        + '},"uuid":"'
    )
    assert got.endswith('"}]}],"stream_options":{"include_usage":true,"other":100.0}}')


def test_a_prompt_of_tokens_cannot_steer_the_engine(echo: Stage) -> None:
    sampling = '{"max_tokens": 5, "extra_args": {"kv_transfer_params": {}}, "seed": 1.0}'
    body = '{"model": "echo", "token_ids": [1, 2], "sampling_params": ' + sampling + "}"
    got = sent(echo.post("/inference/v1/generate", content=body.encode(), headers=JSON)).body
    assert got == b'{"model": "echo","token_ids": [1, 2],"sampling_params": {"max_tokens": 5,"seed": 1.0}}'
    forged = {"model": MODEL, "token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {"image": ["a"]}}}
    refused = echo.post("/inference/v1/generate", forged)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "features")


def test_a_client_that_would_rather_have_a_websocket_is_told_to_use_http(echo: Stage) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-key": "eA=="}
    for path in ("/v1/responses", "/v1/realtime?model=echo"):
        answer = echo.get(path, headers={**upgrade, "sec-websocket-version": "13"})
        assert (answer.status_code, error_of(answer)["code"]) == (426, "upgrade_not_possible")
        assert answer.headers["upgrade"] == "HTTP/1.1"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages/count_tokens"])
def test_media_ids_are_dropped_wherever_a_body_holds_them(echo: Stage, path: str) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(5)}, "uuid": "forged"}
    result = {"type": "tool_result", "content": [{"type": "text", "text": "x"}, dict(image)]}
    conversations = [user("x"), user([dict(image), result])]
    body = {"model": MODEL, "messages": conversations, "metadata": {"uuid": "theirs"}}
    request = sent(echo.post(path, body))
    assert b"forged" not in request.body
    assert request.json["metadata"] == {"uuid": "theirs"}


def test_all_of_a_form_arrives(echo: Stage) -> None:
    answer = echo.post(AUDIO, files=SOUND, data={"model": MODEL, "language": "en"})
    assert sent(answer).form == {"file": bytes(range(256)), "model": b"echo", "language": b"en"}


def test_what_vllm_trusts_is_taken_out_of_forms(echo: Stage) -> None:
    fields = {"vllm_xargs": '{"session_id":"a"}', "priority": "1", "session_id": "a", "kv_transfer_params[a]": "1"}
    answer = echo.post(AUDIO, files=SOUND, data={"model": MODEL, **fields, "language": "en"})
    assert sent(answer).form == {"file": bytes(range(256)), "model": b"echo", "language": b"en"}


def test_a_form_as_dotnet_writes_it_arrives(echo: Stage) -> None:
    body = (
        b"--x\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=model\r\n\r\necho\r\n"
        b"--x\r\nContent-Disposition: form-data; name=session_id\r\n\r\nforged\r\n"
        b"--x\r\nContent-Disposition: form-data; name=file; filename=a.wav; filename*=utf-8''a.wav\r\n\r\n"
        b"RIFF\r\n--x--\r\n"
    )
    answer = echo.post(AUDIO, content=body, headers={"content-type": 'multipart/form-data; boundary="x"'})
    assert sent(answer).form == {"model": b"echo", "file": b"RIFF"}


@pytest.mark.parametrize("path", [CHAT, "/v1/nonesuch", AUDIO])
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
def test_a_body_that_a_web_page_of_another_origin_may_send_reaches_no_replica(
    echo: Stage, path: str, content_type: str
) -> None:
    body = json.dumps({"model": MODEL, "messages": user("x")}).encode()
    answer = echo.post(path, content=body, headers={"content-type": content_type} if content_type else {})
    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")


def test_a_prompt_that_calls_itself_a_form_is_refused(echo: Stage) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\necho\r\n--x--\r\n'
    answer = echo.post(CHAT, content=body, headers={"content-type": "multipart/form-data; boundary=x"})
    assert answer.status_code == 415


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
def test_json_by_any_of_its_names_is_read(echo: Stage, content_type: str) -> None:
    body = json.dumps({"model": MODEL, "messages": user("x"), "session_id": "forged"}).encode()
    assert b"forged" not in sent(echo.post(CHAT, content=body, headers={"content-type": content_type})).body
