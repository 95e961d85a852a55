"""A replica that is not vLLM: it answers each request with the request that it received, and with forged headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes
from http.server import ThreadingHTTPServer
from typing import Any

import httpx

from bench.cluster import SimReplica
from tests.threaded_server import SilentHandler, in_thread

MODEL = "echo"
FORGED_HEADERS = {
    "Set-Cookie": "session=1",
    "X-Kvgate-Replica": "forged",
    "X-Kvgate-Decision": "forged",
    "X-Request-Id": "forged",
    "X-Of-The-Replica": "kept",
}
OBEYED_HEADERS = {
    "X-Accel-Redirect": "/etc/passwd",
    "X-Sendfile": "/etc/passwd",
    "X-Envoy-Degraded": "true",
    "X-RateLimit-Remaining-Requests": "999999",
    "Clear-Site-Data": '"*"',
    "Strict-Transport-Security": "max-age=0",
    "Alt-Svc": 'h2="evil.example:443"',
    "Refresh": "0;url=http://evil.example",
    "Proxy-Status": "x",
}
"""Browsers or proxies would obey these."""


@dataclass(frozen=True)
class Sent:
    """A request as it arrived at the replica."""

    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def form(self) -> dict[str, bytes]:
        """The fields of a multipart form, read by a different parser than the gateway's."""
        head = f"content-type: {self.headers['content-type']}\r\n\r\n".encode()
        parts = message_from_bytes(head + self.body).get_payload()
        return {part.get_param("name", header="content-disposition"): part.get_payload(decode=True) for part in parts}  # type: ignore


def sent(answer: httpx.Response) -> Sent:
    """The request that the gateway sent to get this answer."""
    assert answer.status_code == 200, answer.text
    document = answer.json()
    return Sent(document["target"], document["headers"], bytes.fromhex(document["body"]))


class _Echo(SilentHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:
            self._echo()

    def do_POST(self) -> None:
        self._echo()

    def _echo(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        assert len(headers) == len(self.headers), "a header was sent twice"
        self._answer({"target": self.path, "headers": headers, "body": body.hex()})

    def _answer(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        for name, value in (FORGED_HEADERS | OBEYED_HEADERS).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running_echo(replica: str) -> Iterator[SimReplica]:
    """Runs the echo under a replica's id, in a thread of the test's process."""
    with in_thread(ThreadingHTTPServer(("127.0.0.1", 0), _Echo)) as server:
        yield SimReplica(replica, server.server_address[1], (), None)  # type: ignore[arg-type]
