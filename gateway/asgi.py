"""The little of HTTP that the hot path needs, straight on ASGI: headers, body, errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from uuid import uuid4

from gateway.admission import Admission
from gateway.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

_MAX_ID_CHARS = 128


class ClientGone(Exception):
    """The client hung up: there is nobody left to answer."""


def headers_of(scope: Scope) -> dict[str, str]:
    """The request's headers by lower-case name; of repeated ones the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def request_id(headers: dict[str, str]) -> str:
    """The client's x-request-id where it is printable and short, else a new one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid4().hex


class Body:
    """A request's body, its bytes accounted for until `release`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._held_bytes = 0
        self.data = b""

    async def read(self, headers: dict[str, str], receive: Receive) -> bytes:
        """Read it whole. Raises ApiError as soon as it is too large, ClientGone when it never ends."""
        if headers.get("content-encoding", "identity").lower() not in ("identity", ""):
            raise ApiError(
                415, "unsupported_encoding", "content-encoding: compressed bodies are not accepted.", "content-encoding"
            )
        declared = headers.get("content-length", "")
        if declared.isdigit():
            self._admission.refuse_larger(int(declared))
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            if chunk:
                self._hold(len(chunk))
                chunks.append(chunk)
            if not message.get("more_body", False):
                break
        self.data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return self.data

    def _hold(self, count: int) -> None:
        self._admission.hold(count, self._held_bytes)
        self._held_bytes += count

    def release(self) -> None:
        self._admission.let_go(self._held_bytes)
        self._held_bytes = 0
        self.data = b""


def with_request_id(send: Send, request_id: str) -> Send:
    """`send`, adding x-request-id to the answer."""

    async def send_with_id(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
        await send(message)

    return send_with_id


async def send_whole(send: Send, status: int, headers: RawHeaders, body: bytes) -> None:
    """An answer in one piece."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, request_id: str, extra: RawHeaders | None = None) -> None:
    """An error in OpenAI's shape."""
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
        *((name.encode(), value.encode()) for name, value in error.headers.items()),
        *(extra or ()),
    ]
    await send_whole(send, error.status, headers, body)
