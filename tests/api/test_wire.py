"""HTTP as clients see it: paths, half-closed connections, answers that a client does not read."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench.cluster import Cluster
from tests.api.stage import Json, Stage, chat_body, fresh, running_gateway, text
from tests.polling import wait_until


@contextmanager
def posted(url: str, body: Json, receive_buffer_bytes: int | None = None) -> Iterator[socket.socket]:
    """A connection with a chat request already sent."""
    address = urlsplit(url)
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.socket() as connection:
        if receive_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        connection.settimeout(20)
        connection.connect((address.hostname, address.port))
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


def all_of(connection: socket.socket) -> bytes:
    said = b""
    while chunk := connection.recv(65536):
        said += chunk
    return said


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_closes_its_half_after_its_request_is_answered(mixed: Stage, stream: bool) -> None:
    """The replica answers slowly, long after the client has closed its half."""
    with posted(mixed.gateways[0], chat_body(text(), model="slow", stream=stream)) as connection:
        connection.shutdown(socket.SHUT_WR)
        said = all_of(connection)
    answer = said.replace(b"HTTP/1.1 102 Processing\r\n\r\n", b"")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


def test_a_client_that_does_not_read_its_stream_gives_its_place_back(
    stage: Stage, open_cluster: Cluster, tmp_path: Path
) -> None:
    with (
        running_gateway(tmp_path, open_cluster.redis_url, stage.sims, {"timeouts": {"write_s": 0.5}}) as url,
        posted(url, chat_body(fresh(), stream=True, max_tokens=100_000), receive_buffer_bytes=4096),
    ):
        impatient = replace(stage, gateways=[url])
        wait_until(lambda: impatient.sample("kvgate_client_disconnects_total") == 1)
        assert impatient.sample("kvgate_requests_in_flight") == 0


def test_every_answer_has_a_date(stage: Stage) -> None:
    for answer in (stage.get("/health"), stage.get("/nonesuch"), stage.chat(fresh()).response):
        assert len(answer.headers.get_list("date")) == 1
        parsedate_to_datetime(answer.headers["date"])


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/sim"])
def test_a_slash_at_the_end_of_a_path_means_nothing(stage: Stage, path: str) -> None:
    answer = stage.get(path + "/")
    assert (answer.status_code, answer.content) == (200, stage.get(path).content)


def test_a_slash_at_the_end_is_not_sent_on(stage: Stage) -> None:
    body = chat_body(fresh())
    answer = stage.post("/v1/chat/completions/", body)
    assert answer.status_code == 200
    assert stage.seen(answer)["path"] == "/v1/chat/completions"


@pytest.mark.parametrize("path", ["/health//", "/v1/models//", "/v1/chat/completions//", "//"])
def test_two_slashes_at_the_end_are_no_path_of_ours(stage: Stage, path: str) -> None:
    assert stage.send("POST" if "chat" in path else "GET", path).status_code == 404
