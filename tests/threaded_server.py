"""A small HTTP server in a thread of this process, for what is asked and what is told to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Server = TypeVar("Server", bound=ThreadingHTTPServer)


class SilentHandler(BaseHTTPRequestHandler):
    """Answers requests, and logs none of them."""

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def in_thread(server: Server) -> Iterator[Server]:
    """The server answers inside the context, and is closed at its end."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
