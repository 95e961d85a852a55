"""Input that is too large is refused while it arrives, in bounded memory."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from bench.cluster import Cluster
from tests.api.stage import Stage, chat_body, error_of, running_gateway, text
from tests.polling import wait_until

MIB = 2**20
BODY_BYTES = 100_000_000
LIMIT_MIB = 64  # limits.max_body_bytes


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def pieces() -> Iterator[bytes]:
    """A body whose length is not declared."""
    yield b'{"model":"sim","messages":[{"role":"user","content":"'
    for _ in range(BODY_BYTES // MIB):
        yield b"a" * MIB
    yield b'"}]}'


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_a_413_in_bounded_memory(stage: Stage, open_cluster: Cluster, declared: bool) -> None:
    pid = open_cluster.gateways[1]["pid"]
    before = resident_mib(pid)
    whole = b"".join(pieces()) if declared else None
    for _ in range(2):
        answer = stage.post("/v1/chat/completions", content=whole or pieces(), gateway=1)
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "request_too_large"
    assert resident_mib(pid) - before < LIMIT_MIB + 32
    assert stage.chat(text(50), gateway=1).response.status_code == 200


def test_a_body_over_the_limit_is_refused_before_it_is_sent(stage: Stage) -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {10**11}\r\n\r\n"
    assert exchange(stage.gateways[0], head.encode()).startswith(b"HTTP/1.1 413 ")


def test_a_large_body_within_the_limit_is_served(stage: Stage) -> None:
    answer = stage.post("/v1/chat/completions", chat_body("", ignored="a" * (20 * MIB)), gateway=1)
    assert answer.status_code == 200


def test_a_head_that_never_ends_is_cut_off_in_bounded_memory(stage: Stage, open_cluster: Cluster) -> None:
    pid = open_cluster.gateways[0]["pid"]
    before = resident_mib(pid)
    answer = exchange(stage.gateways[0], b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * BODY_BYTES)
    assert answer.startswith((b"HTTP/1.1 431 ", b"reset"))
    assert resident_mib(pid) - before < 16


def test_bodies_are_limited_together(stage: Stage, open_cluster: Cluster, tmp_path: Path) -> None:
    """Two uploads together would exceed max_buffered_bytes: the second gets a 429 with Retry-After."""
    config = {"limits": {"max_body_bytes": 40_000, "max_buffered_bytes": 50_000}}
    with running_gateway(tmp_path, open_cluster.redis_url, stage.sims, config) as url:

        def posted(status: int) -> httpx.Response | None:
            body = chat_body("", ignored="a" * 30_000)
            answer = stage.http.post(url + "/v1/chat/completions", json=body)
            return answer if answer.status_code == status else None

        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=10) as half_sent:
            half_sent.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30000\r\n\r\n" + b"{" * 29_000
            )
            refused = wait_until(lambda: posted(429))
        assert error_of(refused)["code"] == "gateway_overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert wait_until(lambda: posted(200))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/route/explain"])
def test_a_body_that_never_ends_is_a_408_and_frees_its_place(
    stage: Stage, open_cluster: Cluster, tmp_path: Path, path: str
) -> None:
    config = {"timeouts": {"body_s": 0.5}, "limits": {"max_in_flight": 1}}
    with running_gateway(tmp_path, open_cluster.redis_url, stage.sims, config) as url:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 30000\r\n\r\n{{".encode()
        answer = exchange(url, head)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in answer
        assert stage.http.post(url + "/v1/chat/completions", json=chat_body("x")).status_code == 200


def exchange(url: str, data: bytes) -> bytes:
    """Send bytes; returns the answer up to the end of its error object, or b"reset" if the peer reset the connection
    before it answered."""
    address = urlsplit(url)
    answer = b""
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        with suppress(OSError):  # the gateway may stop reading early; its answer is still readable
            connection.sendall(data)
        try:
            while chunk := connection.recv(65536):
                answer += chunk
                if b"}}" in answer:
                    break
        except ConnectionResetError:
            return answer or b"reset"
    return answer


def form_of(size: int) -> bytes:
    head = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    return head % (b"model", b"sim") + head % (b"file", b"\r\n--" * (size // 4)) + b"--x--\r\n"


def json_of(**fields: object) -> bytes:
    return json.dumps(
        {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], **fields}
    ).encode()


JSON, FORM = "application/json", "multipart/form-data; boundary=x"
CHAT, TOKENIZE, AUDIO = "/v1/chat/completions", "/tokenize", "/v1/audio/transcriptions"
# /tokenize leaves nothing in the map that would change the placements of other tests.
QUICK = {
    "a long text": (TOKENIZE, JSON, json_of(user="so, it goes on " * 15_000)),
    "a large image": (TOKENIZE, JSON, json_of(user="A" * 3 * MIB)),
    "a conversation": (TOKENIZE, JSON, json_of(messages=[{"role": "user", "content": "x"}] * 300)),
    "a short recording": (AUDIO, FORM, form_of(200_000)),
}
SLOW = {
    "many small messages": (TOKENIZE, JSON, json_of(messages=[{"role": "user", "content": ""}] * 8000)),
    "many parts": (TOKENIZE, JSON, json_of(messages=[{"role": "user", "content": [""] * 8000}])),
    "many values": (TOKENIZE, JSON, json_of(metadata=[[]] * 300_000)),
    "a very large text": (TOKENIZE, JSON, json_of(user="a, b " * MIB)),
    "a long recording": (AUDIO, FORM, form_of(2 * MIB)),
}


@pytest.mark.parametrize(("body", "by_a_worker"), [(what, what in SLOW) for what in (*QUICK, *SLOW)])
def test_what_would_hold_the_event_loop_is_read_in_another_process(stage: Stage, body: str, by_a_worker: bool) -> None:
    path, content_type, content = {**QUICK, **SLOW}[body]
    before = stage.sample("kvgate_worker_reads_total")
    answer = stage.post(path, content=content, headers={"content-type": content_type})
    assert answer.status_code in (200, 400, 404), answer.text
    assert stage.sample("kvgate_worker_reads_total") - before == by_a_worker


@pytest.mark.parametrize(
    ("limit", "fields"),
    [
        ("20000 entries", {"messages": [{"role": "user", "content": ""}] * 20_000}),
        ("20000 content parts", {"messages": [{"role": "user", "content": [""] * 10_000}] * 2}),
        ("262144 fields", {"metadata": [{"a": 1}] * 300_000}),
        ("4194304 values", {"metadata": [0] * 4_500_000}),
        ("128 deep", {"metadata": json.loads("[" * 300 + "]" * 300)}),
    ],
)
def test_a_body_of_too_much_is_refused_by_the_name_of_the_limit(
    stage: Stage, limit: str, fields: dict[str, object]
) -> None:
    answer = stage.post(CHAT, content=json_of(**fields), headers={"content-type": JSON})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "limit_exceeded")
    assert limit in error_of(answer)["message"]


def test_bodies_that_never_come_keep_nobody_out(stage: Stage, open_cluster: Cluster, tmp_path: Path) -> None:
    config = {"limits": {"max_in_flight": 2}}
    with running_gateway(tmp_path, open_cluster.redis_url, stage.sims, config) as url, ExitStack() as held:
        address = urlsplit(url)
        for _ in range(20):
            idle = held.enter_context(socket.create_connection((address.hostname, address.port), timeout=10))
            idle.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30000\r\n\r\n{")
        wait_until(lambda: "kvgate_uploads 20.0" in stage.http.get(url + "/metrics").text)
        assert stage.http.post(url + CHAT, json=chat_body("x")).status_code == 200
    assert stage.chat(text(50)).response.status_code == 200
