"""One request of a client, and its answer. All writes go to the connection at once, without waking another task."""

from __future__ import annotations

import asyncio
import http
import time
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from functools import lru_cache
from typing import Protocol

from gateway.http.pieces import joined

RawHeaders = Sequence[tuple[bytes, bytes]]

_READ_AHEAD_BYTES = 2**18
_BODYLESS_STATUSES = frozenset({204, 304})
_LISTS = (b"accept", b"tracestate", b"anthropic-beta", b"openai-beta")
"""Headers that may come in several lines, which are then one list (RFC 9110, 5.3)."""


class ClientGone(Exception):
    """The client hung up, so there is nobody to answer."""


class ClientConnection(Protocol):
    """The connection of an exchange."""

    @property
    def unsent_bytes(self) -> int: ...

    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def answered(self, exchange: Exchange) -> None:
        """The answer is complete."""
        ...


class Exchange:
    """`receive` the body; then `start`, `write` and `end` the answer, or send it `whole`."""

    __slots__ = (
        "_came_bytes",
        "_can_write",
        "_connection",
        "_expects_continue",
        "_has_all",
        "_held",
        "_is_chunked",
        "_is_paused",
        "_loop",
        "_unsent_head",
        "_waiter",
        "added_headers",
        "has_started",
        "headers",
        "http_version",
        "is_answered",
        "is_gone",
        "keeps_alive",
        "method",
        "path",
        "peer",
        "query",
        "raw_headers",
        "scheme",
        "stops_when_gone",
        "subset",
        "task",
    )

    def __init__(
        self,
        connection: ClientConnection,
        loop: asyncio.AbstractEventLoop,
        method: str,
        path: str,
        query: bytes,
        raw_headers: list[tuple[bytes, bytes]],
        http_version: str,
        keeps_alive: bool,
        peer: str,
        scheme: str,
    ) -> None:
        self.scheme = scheme
        self.peer = peer
        """The client's address without its port; empty if it has none."""
        self.method = method
        self.path = path
        """Percent-decoded once."""
        self.query = query
        self.raw_headers = raw_headers
        """Names in lower case."""
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw_headers}
        """All values of a list, the last value of another header that is repeated."""
        if len(self.headers) < len(raw_headers):
            self.headers |= _lists(raw_headers)
        self.http_version = http_version
        self.keeps_alive = keeps_alive
        self.task: asyncio.Task[None]
        """The task that answers. The connection starts it."""
        self.stops_when_gone = False
        """Whether `task` is cancelled when the client hangs up."""
        self.subset: frozenset[str] | None = None
        """The `host:port` of the replicas that it may go to; None if any."""
        self.added_headers: RawHeaders = ()
        """Of its answer, whoever gives it."""
        self.has_started = False
        self.is_answered = False
        self.is_gone = False
        self._connection = connection
        self._loop = loop
        self._held: bytes | bytearray = b""
        self._came_bytes = 0
        self._has_all = self._is_paused = False
        self._is_chunked = False
        self._unsent_head = b""
        """The head is sent with the first piece of the body, which saves a system call."""
        self._expects_continue = http_version != "1.0" and self.headers.get("expect", "").lower() == "100-continue"
        self._waiter: asyncio.Future[None] | None = None
        self._can_write: asyncio.Future[None] | None = None

    # -- the request's body --------------------------------------------------------------------------------------

    @property
    def has_body(self) -> bool:
        """Whether the whole body has come."""
        return self._has_all

    @property
    def missing_bytes(self) -> int | None:
        """How much of the body has not come yet; None if its length is unknown."""
        declared = self.headers.get("content-length")
        return None if declared is None else int(declared) - self._came_bytes

    async def receive(self) -> bytes | bytearray:
        """The part of the body that has come since the last call; empty at the end. Raises ClientGone."""
        if self._expects_continue:
            self._expects_continue = False
            if not self._held and not self._has_all:
                self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not self._held and not self._has_all:
            if self.is_gone:
                raise ClientGone
            self._waiter = self._loop.create_future()
            await self._waiter
        return self.take()

    def take(self) -> bytes | bytearray:
        """Like `receive`, without waiting. Empty also if nothing has come."""
        held, self._held = self._held, b""
        if self._is_paused:
            self._is_paused = False
            self._connection.resume_reading()
        return held

    def put(self, piece: bytes) -> None:
        """The connection calls this when more of the body has come."""
        self._came_bytes += len(piece)
        if self.is_answered:
            return
        self._held = joined(self._held, piece)
        if len(self._held) > _READ_AHEAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._connection.pause_reading()
        self._wake()

    def put_end(self) -> None:
        """The connection calls this when the whole body has come."""
        self._has_all = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the answer ----------------------------------------------------------------------------------------------

    def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send the whole answer at once."""
        self.has_started = True
        has_length = status not in _BODYLESS_STATUSES
        head = self._head(status, headers, b"content-length: %d\r\n" % len(body) if has_length else b"")
        self._write(head if self.method == "HEAD" else head + body)
        self._complete()

    def start(self, status: int, headers: RawHeaders, length_bytes: int | None = None) -> None:
        """Begin an answer with its status and headers. `length_bytes` is None if the body's length is unknown."""
        self.has_started = True
        has_body = self.method != "HEAD" and status not in _BODYLESS_STATUSES
        self._is_chunked = has_body and length_bytes is None and self.http_version != "1.0"
        length = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        if length_bytes is not None:
            length = b"content-length: %d\r\n" % length_bytes
        elif has_body and not self._is_chunked:
            self.keeps_alive = False  # the end of the connection marks the end of the body
        self._unsent_head = self._head(status, headers, length)

    def write(self, data: bytes) -> bool:
        """Send a piece of the body, which is not empty. Returns False if the client does not keep up: then wait for
        `drained`. If the client is gone, this does nothing."""
        if piece := self._framed(data):
            self._write(piece)
        return self._can_write is None or self.is_gone

    def end(self, data: bytes = b"") -> None:
        """End the answer with the last piece of its body."""
        last = self._framed(data) + b"0\r\n\r\n" if self._is_chunked else self._framed(data)
        if last:
            self._write(last)
        self._complete()

    def _framed(self, data: bytes) -> bytes:
        """The bytes to send for a piece of the body."""
        head, self._unsent_head = self._unsent_head, b""
        if not data or self.method == "HEAD":
            return head
        if self._is_chunked:
            return b"%b%x\r\n%b\r\n" % (head, len(data), data)
        return head + data if head else data

    @property
    def unsent_bytes(self) -> int:
        """The written bytes that the client has not taken yet."""
        return 0 if self.is_gone else self._connection.unsent_bytes

    async def drained(self) -> None:
        """Wait until the client has taken most of the written bytes, or is gone."""
        while self._can_write is not None and not self.is_gone:
            await asyncio.shield(self._can_write)

    def _head(self, status: int, headers: RawHeaders, length: bytes) -> bytes:
        if self.added_headers:
            headers = [*headers, *self.added_headers]
        if any(name == b"connection" and value == b"close" for name, value in headers):
            self.keeps_alive = False
        elif not self.keeps_alive:
            length += b"connection: close\r\n"
        return answer_head(status, headers, length)

    def _write(self, data: bytes) -> None:
        if not self.is_gone:
            self._connection.write(data)

    def _complete(self) -> None:
        self.is_answered = True
        self._held = b""
        self._connection.answered(self)

    # -- called by the connection --------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        if self._can_write is None:
            self._can_write = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._can_write is not None:
            waiter, self._can_write = self._can_write, None
            waiter.set_result(None)

    def lost(self) -> None:
        """The client hung up. Stops the task that answers, if `stops_when_gone`."""
        self.is_gone = True
        self._wake()
        self.resume_writing()
        if self.stops_when_gone and not self.is_answered:
            self.task.cancel()


def _lists(raw_headers: RawHeaders) -> dict[str, str]:
    """The lists among these headers, each in one value."""
    found: dict[str, str] = {}
    for raw, value in raw_headers:
        if raw in _LISTS and value.strip():
            name, text = raw.decode(), value.decode("latin-1")
            found[name] = f"{found[name]}, {text}" if name in found else text
    return found


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}


@lru_cache(maxsize=1)
def _date_line(second: int) -> bytes:
    return f"date: {formatdate(second, usegmt=True)}\r\n".encode()


def answer_head(status: int, headers: Iterable[tuple[bytes, bytes]], last_lines: bytes) -> bytes:
    """An answer's head: status line, Date, headers, empty line. `last_lines` are headers that are encoded already."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"".join((_STATUS_LINES[status], _date_line(int(time.time())), *lines, last_lines, b"\r\n"))
