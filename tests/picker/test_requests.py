"""What clients of an Envoy get that asks pickers: what clients of a gateway get."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from PIL import Image

from bench.cluster import Cluster, SimReplica
from bench.envoy import PASSES
from bench.pickers import Picker, running_pickers
from gateway.ops.local.ports import free_ports
from tests.api.stage import chat_body, fresh, text
from tests.certificates import self_signed
from tests.picker.stage import CHAT, ask, is_idle, replica_of, running_envoy, stream, words_of
from tests.polling import wait_until
from tests.programs import needs
from tests.threaded_server import SilentHandler, in_thread

pytestmark = needs("envoy")
_OF_ONE_ANSWER = ("id", "created", "created_at", "completed_at", "request_id", "prompt_tokens_details")
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: chat_body("what is a proxy?"),
    "/v1/completions": {"model": "sim", "prompt": "once upon a time", "max_tokens": 5},
    "/v1/messages": {"model": "sim", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"model": "sim", "input": "hello", "max_output_tokens": 5},
    "/v1/embeddings": {"model": "sim", "input": "hello"},
    "/v1/rerank": {"model": "sim", "query": "which?", "documents": ["this one", "that one"]},
    "/v1/score": {"model": "sim", "text_1": "this", "text_2": ["that", "those"]},
    "/pooling": {"model": "sim", "input": "hello"},
    "/tokenize": {"model": "sim", "prompt": "hello"},
    "/detokenize": {"model": "sim", "tokens": [1, 2, 3]},
    "/v1/completions??": {"model": "sim", "prompt": ["one", "two"], "max_tokens": 3, "n": 2},
    "/v1/chat/completions?": chat_body("no model", model="missing"),
    "/v1/completions?": {"model": "sim", "prompt": 7},
    "/collective_rpc": {},
}


def same(document: Any) -> Any:
    """Without what differs between two answers."""
    if isinstance(document, dict):
        return {name: same(value) for name, value in document.items() if name not in _OF_ONE_ANSWER}
    return [same(each) for each in document] if isinstance(document, list) else document


def post(url: str, path: str, body: Any, **details: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=30, trust_env=False, **details)


@pytest.mark.parametrize("path", REQUESTS)
def test_an_answer_is_the_one_that_a_gateway_gives(url: str, cluster: Cluster, path: str) -> None:
    expected, answer = (post(each, path, REQUESTS[path]) for each in (cluster.gateway_urls[0], url))
    assert answer.status_code == expected.status_code
    assert answer.headers["content-type"].split(";")[0] == expected.headers["content-type"].split(";")[0]
    own = {"/v1/messages": "usage", "/v1/responses": "usage"}.get(path, "")  # the second one may be cached
    documents = [orjson.loads(each.content) for each in (expected, answer)]
    if own and answer.status_code == 200:
        assert all(each.pop(own)["output_tokens"] == 5 for each in documents)
    assert same(documents[1]) == same(documents[0])


def test_a_stream_has_the_words_that_a_gateway_gives(url: str, cluster: Cluster) -> None:
    prompt = text()
    answers = [ask(each, prompt, stream=True, max_tokens=30) for each in (cluster.gateway_urls[0], url)]
    assert [answer.headers["content-type"].split(";")[0] for answer in answers] == ["text/event-stream"] * 2
    assert words_of(answers[0].text) == words_of(answers[1].text)
    assert len(words_of(answers[1].text)) == 30
    assert answers[1].text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "limit"), [("/v1/messages", "max_tokens"), ("/v1/responses", "max_output_tokens")])
def test_a_stream_of_another_api_has_the_events_that_a_gateway_gives(
    url: str, cluster: Cluster, path: str, limit: str
) -> None:
    body = {**REQUESTS[path], "stream": True, limit: 12}
    streams = [post(each, path, body).text for each in (cluster.gateway_urls[0], url)]
    kinds = [[line for line in stream.splitlines() if line.startswith("event: ")] for stream in streams]
    assert kinds[0] == kinds[1]
    assert len(kinds[1]) > 12


def test_an_image_keeps_its_chat_at_one_replica(url: str) -> None:
    picture = "data:image/png;base64," + base64.b64encode(_png(fresh())).decode()
    parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is it?"}]
    answers = [ask(url, parts) for _ in range(6)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-kvgate-replica"] for answer in answers}) == 1
    assert all(int(answer.headers["x-kvgate-matched-tokens"]) > 0 for answer in answers[1:])


def _png(what: str) -> bytes:
    """An image that no other test sends."""
    image = Image.new("RGB", (640, 480), tuple(what.encode()[-3:]))
    image.save(written := io.BytesIO(), "PNG")
    return written.getvalue()


def test_the_models_are_those_that_gateways_list(url: str, cluster: Cluster) -> None:
    listed = [httpx.get(f"{each}/v1/models", trust_env=False).json() for each in (url, cluster.gateway_urls[0])]
    assert same(listed[0]) == same(listed[1])
    assert httpx.get(f"{url}/v1/models/sim", trust_env=False).json()["id"] == "sim"


def test_no_path_reaches_a_replica_but_those_that_gateways_know(url: str) -> None:
    assert httpx.get(f"{url}/version", trust_env=False).json().keys() == {"version"}
    refused = ("sleep", "a//sleep", "sim/reset_cache", "v1/keys")
    assert [httpx.post(f"{url}/{path}", trust_env=False).status_code for path in refused] == [404] * len(refused)


def test_one_prefix_stays_with_one_replica_whichever_picker_and_gateway_is_asked(
    url: str, cluster: Cluster, pickers: list[Picker]
) -> None:
    begin, before = text(), [picker.metric("kvgate_requests_total", CHAT) for picker in pickers]
    answers = [ask(url, f"{begin} {number}") for number in range(12)]
    answers += [ask(each, begin) for each in cluster.gateway_urls]
    assert len({answer.headers["x-kvgate-replica"] for answer in answers}) == 1
    assert all(int(answer.headers["x-kvgate-matched-tokens"]) > 500 for answer in answers[1:])
    after = [picker.metric("kvgate_requests_total", CHAT) for picker in pickers]
    assert sum(now > then for now, then in zip(after, before, strict=True)) >= 2, "luck could pass this with one picker"


def test_a_body_of_10_mb_passes_and_one_that_comes_byte_by_byte(url: str) -> None:
    assert ask(url, user="x" * 10_000_000).status_code == 200
    body = orjson.dumps(chat_body("slowly"))
    pieces = (body[at : at + 1] for at in range(len(body)))
    answer = httpx.post(f"{url}{CHAT}", content=pieces, headers={"content-type": "application/json"}, trust_env=False)
    assert answer.status_code == 200


def test_tokens_come_at_once_and_nothing_is_left_of_a_client_that_hangs_up(url: str, cluster: Cluster) -> None:
    for sim in cluster.replicas:
        sim.fail("hang", after_tokens=3)
    with stream(url, max_tokens=20) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert len([next(lines) for _ in range(3)]) == 3, "the engine has stopped in the middle of its answer"
    for sim in cluster.replicas:
        sim.fail("none")
    wait_until(lambda: is_idle(cluster))


def test_a_client_that_hangs_up_before_its_body_is_sent_leaves_nothing(url: str, pickers: list[Picker]) -> None:
    def body() -> Iterator[bytes]:
        yield b'{"model": '
        raise ConnectionError

    with pytest.raises(ConnectionError):
        httpx.post(f"{url}{CHAT}", content=body(), trust_env=False)
    gauges = ("kvgate_in_flight_requests", "kvgate_uploads", "kvgate_held_bytes")
    wait_until(lambda: not any(picker.metric(gauge) for picker in pickers for gauge in gauges))


def seen_of(cluster: Cluster, answer: httpx.Response) -> Any:
    """The replica's record of the request with this answer."""
    recent = replica_of(cluster, answer).state()["recent"]
    return next(each for each in recent if each["request_id"] == answer.headers["x-request-id"])


def test_the_replica_sees_no_header_of_a_client_that_engines_obey(url: str, cluster: Cluster) -> None:
    asked = {"x-vllm-priority": "9", "x-session-id": "theirs", "x-data-parallel-rank": "7"}
    headers = seen_of(cluster, post(url, CHAT, chat_body(fresh()), headers=asked))["headers"]
    assert headers.keys() <= {"X-Request-Id", "X-Session-ID"}
    assert headers.get("X-Session-ID") != "theirs"


class _Trap(SilentHandler):
    was_asked = threading.Event()

    def do_POST(self) -> None:
        self.was_asked.set()
        self.send_error(418)

    do_GET = do_POST


def test_a_client_cannot_name_the_address_that_its_request_goes_to(url: str) -> None:
    with in_thread(ThreadingHTTPServer(("127.0.0.1", 0), _Trap)) as trap:
        named = {"x-gateway-destination-endpoint": f"127.0.0.1:{trap.server_port}"}
        assert post(url, CHAT, chat_body(fresh()), headers=named).status_code == 200
        assert httpx.get(f"{url}/version", headers=named, trust_env=False).status_code == 200
        assert not _Trap.was_asked.is_set()


_EXT_PROC = "                  - name: envoy.filters.http.ext_proc\n"


def _set_metadata(namespace: str, value: str) -> str:
    """A filter for Envoy's file."""
    return f"""                  - name: envoy.filters.http.set_metadata
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
                      metadata: [{{ metadata_namespace: {namespace}, value: {value} }}]
"""


def subset_of(endpoints: str) -> dict[str, str]:
    """What to write in Envoy's file so that it allows these endpoints only."""
    metadata = _set_metadata("envoy.lb.subset_hint", f'{{ x-gateway-destination-endpoint-subset: "{endpoints}" }}')
    told = "                      message_timeout: 90s\n"
    forwarded = """                      metadata_options:
                        forwarding_namespaces: { untyped: ["envoy.lb.subset_hint"] }
"""
    return {_EXT_PROC: metadata + _EXT_PROC, told: told + forwarded}


def test_requests_go_to_the_endpoints_that_the_proxy_allows_and_to_no_other(
    cluster: Cluster, pickers: list[Picker], tmp_path: Path
) -> None:
    allowed = cluster.replicas[1]
    endpoints = f"{allowed.url.removeprefix('http://')},10.9.9.9:8000"
    with running_envoy(pickers, tmp_path, subset_of(endpoints)) as url:
        assert {ask(url).headers["x-kvgate-replica"] for _ in range(8)} == {allowed.id}
        assert httpx.get(f"{url}/version", trust_env=False).status_code == 200
        allowed.fail("error", count=-1)
        assert ask(url).status_code == 500, "no other replica is asked"
        with running_envoy(pickers, tmp_path, {**PASSES, **subset_of(endpoints)}) as passes:
            unread = ask(passes)
        assert (unread.status_code, unread.json()["error"]["code"]) == (500, "replica_error")
        allowed.fail("none")
    with running_envoy(pickers, tmp_path, subset_of("10.9.9.9:8000")) as url:
        answers = [ask(url), httpx.get(f"{url}/version", trust_env=False)]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert answers[0].json()["error"]["code"] == "no_replica_in_subset"


def test_an_object_of_a_model_is_found_where_the_proxy_allows_only_that_models_replica(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = SimReplica("other", *free_ports(1), ("--model", "other", "--served-name", "other"), tmp_path / "other.log")
    replicas = [{"id": each.id, "url": each.url} for each in (*cluster.replicas, other)]
    other.start()
    try:
        other.wait_until_ready()
        allowed = subset_of(other.url.removeprefix("http://"))
        with (
            running_pickers(cluster, tmp_path, 1, {"replicas": replicas}) as pickers,
            running_envoy(pickers, tmp_path, allowed) as url,
        ):
            made = post(url, "/v1/responses", {"model": "other", "input": "hello"}).json()
            assert httpx.get(f"{url}/v1/responses/{made['id']}", trust_env=False).json()["id"] == made["id"]
            with running_envoy(pickers, tmp_path, subset_of(cluster.replicas[0].url.removeprefix("http://"))) as beyond:
                refused = httpx.get(f"{beyond}/v1/responses/{made['id']}", trust_env=False)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica_in_subset")
    finally:
        other.kill()


@contextmanager
def other_pickers(cluster: Cluster, folder: Path, settings: dict[str, Any], **picker: Any) -> Iterator[str]:
    """An Envoy and two pickers with other settings than those of the other tests."""
    with running_pickers(cluster, folder, 2, settings, **picker) as pickers, running_envoy(pickers, folder) as url:
        yield url


def test_the_tenant_is_the_one_that_the_proxy_has_authenticated(cluster: Cluster, tmp_path: Path) -> None:
    limited = {
        "security": {"share_cache": True, "expose_decisions": True},
        "tenants": [{"name": "small", "limits": {"requests_per_min": 2}}],
    }
    with other_pickers(cluster, tmp_path, limited, tenant={"header": "x-tenant"}) as url:
        statuses = {
            tenant: [post(url, CHAT, chat_body(fresh()), headers={"x-tenant": tenant}).status_code for _ in range(4)]
            for tenant in ("small", "large")
        }
        assert statuses == {"small": [200, 200, 429, 429], "large": [200] * 4}
        token = {"x-tenant": "large", "authorization": "Bearer of the proxy"}
        assert "Authorization" not in seen_of(cluster, post(url, CHAT, chat_body(fresh()), headers=token))["headers"]
        unknown = ask(url)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (401, "tenant_unknown")


def test_the_tenant_may_be_in_metadata_or_in_an_attribute(cluster: Cluster, tmp_path: Path) -> None:
    shared = {"security": {"share_cache": True, "expose_decisions": True}}
    told = "                      message_timeout: 90s\n"
    for source, sent in (
        ({"attribute": "request.method"}, "request_attributes: [request.method]"),
        ({"metadata": ["who", "tenant"]}, "metadata_options: { forwarding_namespaces: { untyped: [who] } }"),
    ):
        metadata = _set_metadata("who", '{ tenant: "POST" }')
        changes = {_EXT_PROC: metadata + _EXT_PROC, told: told + f"                      {sent}\n"}
        with (
            running_pickers(cluster, tmp_path, 1, shared, tenant=source) as pickers,
            running_envoy(pickers, tmp_path, changes, path="/version") as url,
        ):
            assert ask(url).status_code == 200
            counted = pickers[0].metric("kvgate_requests_total", 'tenant="POST"')
            assert counted == 1


@needs("openssl")
def test_only_a_proxy_with_a_certificate_of_the_right_authority_may_call(cluster: Cluster, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "proxy", "127.0.0.1")
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(certificate)}
    shown = f"""common_tls_context:
            alpn_protocols: [h2]
            tls_certificates:
              - {{ certificate_chain: {{ filename: {certificate} }}, private_key: {{ filename: {key} }} }}"""
    with running_pickers(cluster, tmp_path, 1, tls=tls) as pickers:
        with running_envoy(pickers, tmp_path, {"common_tls_context: { alpn_protocols: [h2] }": shown}) as url:
            assert ask(url).status_code == 200
        with running_envoy(pickers, tmp_path, status=503) as url:
            assert ask(url).status_code == 500


def test_requests_wait_for_room_within_envoys_call_and_a_full_queue_refuses(cluster: Cluster, tmp_path: Path) -> None:
    full = {"policy": {"max_active_requests": 1}, "queue": {"max_waiting": 1, "wait_s": 30}}
    with running_pickers(cluster, tmp_path, 2, full) as pickers, running_envoy(pickers, tmp_path) as url:
        open_streams = [stream(url, max_tokens=4000) for _ in cluster.replicas]
        answers = [each.__enter__() for each in open_streams]
        assert [answer.status_code for answer in answers] == [200] * 3
        results: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: results.append(ask(url)))
        waiting.start()
        wait_until(lambda: any(picker.metric("kvgate_queue_waiting_requests") for picker in pickers))
        assert (refused := ask(url)).status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) > 0
        for each in open_streams:
            each.__exit__(None, None, None)
        waiting.join()
        assert results[0].status_code == 200
        assert "waited_ms=" in results[0].headers["x-kvgate-decision"]


def test_a_mode_in_which_a_picker_cannot_work_is_named(pickers: list[Picker], tmp_path: Path) -> None:
    wrong = {"response_body_mode: FULL_DUPLEX_STREAMED": "response_body_mode: BUFFERED"}
    with running_envoy(pickers, tmp_path, wrong, status=500) as url:
        error = ask(url).json()["error"]
    assert error["code"] == "picker_misconfigured"
    assert "response_body_mode" in error["message"]
