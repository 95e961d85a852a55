"""A replica whose answers are large. It sends only the first half of them, except for one model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from tests.threaded_server import SilentHandler, in_thread

MODELS = ("whole", "cut", "cut-chunked", "silent")
"""Each name says how the model's answers end. `whole`: completely. `cut`: the connection closes half way; with
`-chunked` the answer declares no length. `silent`: never."""
_TEXT = "word " * 800_000  # 4 MB: a gateway starts to pass such an answer on before it has all of it


class HalfReplica(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fell_silent = threading.Semaphore(0)
        """Released when half of a `silent` answer is sent."""
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running_half_replica() -> Iterator[HalfReplica]:
    """Runs the replica in a thread of the test's process."""
    with in_thread(HalfReplica()) as replica:
        try:
            yield replica
        finally:
            replica.is_over.set()


class _Handler(SilentHandler):
    protocol_version = "HTTP/1.1"
    server: HalfReplica

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": model, "object": "model"} for model in MODELS]}).encode()
        self._head("Content-Length", str(len(body)))
        self.wfile.write(body)

    def do_POST(self) -> None:
        model = json.loads(self.rfile.read(int(self.headers["content-length"])))["model"]
        body = json.dumps(_answer(self.path, model)).encode()
        half = body[: len(body) // 2]
        if model == "cut-chunked":
            self._head("Transfer-Encoding", "chunked")
            self.wfile.write(b"%x\r\n%b\r\n" % (len(half), half))
        else:
            self._head("Content-Length", str(len(body)))
            self.wfile.write(body if model == "whole" else half)
        if model == "silent":
            self.server.fell_silent.release()
            self.server.is_over.wait()
        self.close_connection = model != "whole"

    def _head(self, framing: str, value: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header(framing, value)
        self.end_headers()


def _answer(path: str, model: str) -> dict[str, Any]:
    """A whole answer in the API of this path."""
    text = {"type": "output_text" if path == "/v1/responses" else "text", "text": _TEXT, "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [text]}
    match path:
        case "/v1/messages":
            own = {**message, "stop_reason": "end_turn", "usage": {"input_tokens": 1, "output_tokens": 1}}
        case "/v1/responses":
            own = {"id": "resp_1", "object": "response", "status": "completed", "output": [message]}
        case "/v1/completions":
            choice = {"index": 0, "text": _TEXT, "finish_reason": "stop"}
            own = {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}
        case _:
            choice = {"index": 0, "message": {"role": "assistant", "content": _TEXT}, "finish_reason": "stop"}
            own = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]}
    return {"model": model, "created": 1, "created_at": 1, **own}
