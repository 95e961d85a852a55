"""Some paths must never reach a replica, in any spelling. The replicas count the calls that reach them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench.cluster import Cluster
from tests.api.stage import Stage, error_of, running_gateway

SPELLINGS = [
    "/v1/load_lora_adapter",
    "/v1/load_lora_adapter/",
    "/v1/load_lora_adapter?x=1",
    "/v1/load_lora_adapter#x",
    "/v1/load_lora_adapter/x",
    "/v1//load_lora_adapter",
    "//v1/load_lora_adapter",
    "/v1/LOAD_lora_adapter",
    "/V1/load_lora_adapter",
    "/v1/%6coad_lora_adapter",
    "/v1/load%5Flora%5fadapter",
    "/v1/%256coad_lora_adapter",
    "/v1%2fload_lora_adapter",
    "/v1/load_lora_adapter%2f",
    "/v1/./load_lora_adapter",
    "/v1/%2e/load_lora_adapter",
    "/./v1/load_lora_adapter",
    "/v1/x/../load_lora_adapter",
    "/v1/x/%2e%2e/load_lora_adapter",
    "/v1/x/.%2E/load_lora_adapter",
    "/v1/x%2f..%2fload_lora_adapter",
    "/v1/x/%252e%252e/load_lora_adapter",
    "/v1/chat/completions/../../load_lora_adapter",
    "/v1/models/../load_lora_adapter",
    "/v1/responses/../load_lora_adapter",
    "/v1\\load_lora_adapter",
    "/v1/x/..\\load_lora_adapter",
    "/v1/x/..%5cload_lora_adapter",
    "/v1/load_lora_adapter%00",
    "/v1/load_lora_adapter%20",
    "/v1/load_lora_adapter;x=1",
    "/v1/x;/../load_lora_adapter",
    "http://elsewhere.example/v1/load_lora_adapter",
]
OUTSIDE = [
    "/reset_prefix_cache",
    "/sim/reset_cache",
    "/v1/../reset_prefix_cache",
    "/v1/../sim/reset_cache",
    "/v1/%2e%2e/sim/reset_cache",
    "/v1/x/../../sim/reset_cache",
    "/v1/..%2fsim%2freset_cache",
    "/v1/./../sim/reset_cache",
    "/tokenize/../sim/reset_cache",
    "/tokenize%2f..%2fsim%2freset_cache",
]


def send_as_spelled(url: str, target: str, body: bytes) -> bytes:
    """POST with exactly this request line: client libraries would normalize it. Returns the status line and headers."""
    address = urlsplit(url)
    head = f"POST {target} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        answer = b""
        while b"\r\n\r\n" not in answer and (chunk := connection.recv(4096)):
            answer += chunk
    return answer.partition(b"\r\n\r\n")[0]


@pytest.mark.parametrize("target", [*SPELLINGS, *(one.replace("load_", "unload_") for one in SPELLINGS[:3])])
def test_no_spelling_of_a_denied_path_reaches_a_replica(stage: Stage, target: str) -> None:
    before = stage.counted("lora_calls")
    answer = send_as_spelled(stage.gateways[0], target, json.dumps({"model": "sim", "lora_name": "x"}).encode())
    assert answer.split()[1] in (b"404", b"405"), answer
    assert stage.counted("lora_calls") == before


@pytest.mark.parametrize("target", OUTSIDE)
def test_no_spelling_leads_out_of_v1(stage: Stage, target: str) -> None:
    prompt = "what is cached stays cached " * 40
    stage.chat(prompt)
    answer = send_as_spelled(stage.gateways[0], target, b'{"model": "sim"}')
    assert answer.split()[1] in (b"404", b"405"), answer
    assert b"x-kvgate-replica" not in answer.lower()
    assert stage.chat(prompt).cached_tokens > 200


def test_a_path_that_could_be_read_in_two_ways_is_a_404_that_says_so(stage: Stage) -> None:
    answer = stage.post("/v1/chat//completions", {"model": "sim"})
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "path_not_allowed"


def test_an_escaped_letter_changes_nothing_about_a_path_that_is_allowed(stage: Stage) -> None:
    prompt = "the same prompt under another spelling of its path " * 40
    first = stage.chat(prompt)
    answer = send_as_spelled(
        stage.gateways[0],
        "/v1/%63hat/complet%69ons",
        json.dumps({"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": prompt}]}).encode(),
    )
    headers = dict(line.split(": ", 1) for line in answer.decode().split("\r\n")[1:])
    assert headers["x-kvgate-replica"] == first.replica
    assert headers["x-kvgate-decision"].startswith("hit")


def test_the_deny_list_is_the_configurations(stage: Stage, open_cluster: Cluster, tmp_path: Path) -> None:
    config = {"security": {"denied_paths": ["/tokenize", "/v1/embeddings/"]}}
    with running_gateway(tmp_path, open_cluster.redis_url, stage.sims, config) as url:
        for path, status in (("/tokenize", 404), ("/v1/embeddings", 404), ("/detokenize", 200)):
            body = {"model": "sim", "prompt": "x", "tokens": [1]}
            assert stage.http.post(url + path, json=body).status_code == status, path


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/load_lora_adapter", "at each replica"),
        ("/sleep", "administers"),
        ("/inference/v1/abort_requests", "administers"),
        ("/fault_tolerance/apply", "administers"),
        ("/server_info", "one engine"),
        ("/ping", "ask /health"),
        ("/v1/nobody/has/decided", "security.allowed_paths"),
    ],
)
def test_a_path_that_clients_do_not_reach_is_refused_with_the_reason(stage: Stage, path: str, why: str) -> None:
    answer = stage.post(path, {"model": "sim"})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "path_not_allowed")
    assert why in error_of(answer)["message"]


def test_what_is_allowed_passes_but_for_what_is_denied_or_administers(
    stage: Stage, open_cluster: Cluster, tmp_path: Path
) -> None:
    config = {"security": {"allowed_paths": ["/v1", "/custom/"], "denied_paths": ["/v1/no"]}}
    with running_gateway(tmp_path, open_cluster.redis_url, stage.sims, config) as url:

        def reaches_a_replica(path: str) -> bool:
            return "x-kvgate-replica" in stage.http.post(url + path, json={"model": "sim"}).headers

        assert all(map(reaches_a_replica, ("/v1/any/thing", "/custom", "/custom/x")))
        assert not any(map(reaches_a_replica, ("/v1/no/thing", "/v1/load_lora_adapter", "/customs", "/v3/x", "/sleep")))
