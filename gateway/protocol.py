"""HTTP/1.1 on a socket: uvicorn's protocol, with a limit on a request's head and this API's error shape.

uvicorn gathers a head of any size, and says what is wrong with a malformed one in plain text.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; as much as the strictest load balancers in front allow."""

_MALFORMED = ApiError(400, "invalid_http", "This is not a well-formed HTTP/1.1 request.")
_HEAD_TOO_LARGE = ApiError(
    431,
    "headers_too_large",
    f"headers: the request line and headers together exceed {MAX_HEAD_BYTES} bytes.",
    "headers",
)


class HeadTooLarge(Exception):
    """Raised out of the parser, which then stops."""


class HttpProtocol(HttpToolsProtocol):
    """One client connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unfinished_bytes = 0
        """What has arrived of a head that is not complete; at most one read too many."""
        self._in_head = False
        self._refusal = _MALFORMED

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse_with(_HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._unfinished_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
            raise HeadTooLarge
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to whatever was raised in its parser."""
        self._refuse_with(self._refusal)

    def _refuse_with(self, error: ApiError) -> None:
        body = error.body()
        head = f"HTTP/1.1 {error.status} {error.code}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
