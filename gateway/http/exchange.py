"""One request of a client, and the answer to it. Everything that is sent is written at once, without a task's turn."""

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


class ClientGone(Exception):
    """The client hung up: there is nobody left to answer."""


class ClientConnection(Protocol):
    """The connection that an exchange takes place on."""

    @property
    def unsent_bytes(self) -> int: ...

    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def answered(self, exchange: Exchange) -> None:
        """The answer is complete."""
        ...


class Exchange:
    """`receive` the body, then `start`, `write` and `end` the answer, or send it `whole`."""

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
        "stops_when_gone",
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
    ) -> None:
        self.peer = peer
        """The client's address, without its port; empty where it has none."""
        self.method = method
        self.path = path
        """Decoded once."""
        self.query = query
        self.raw_headers = raw_headers
        """Names in lower case."""
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw_headers}
        """Of repeated ones the last."""
        self.http_version = http_version
        self.keeps_alive = keeps_alive
        self.task: asyncio.Task[None]
        """What answers: set by the connection that starts it."""
        self.stops_when_gone = False
        """Whether `task` is cancelled when the client hangs up."""
        self.has_started = False
        self.is_answered = False
        self.is_gone = False
        self._connection = connection
        self._loop = loop
        self._held: bytes | bytearray = b""
        self._came_bytes = 0
        self._has_all = False
        self._is_paused = False
        self._is_chunked = False
        self._unsent_head = b""
        """It goes out with the first piece of the body: that is one system call less."""
        self._expects_continue = http_version != "1.0" and self.headers.get("expect", "").lower() == "100-continue"
        self._waiter: asyncio.Future[None] | None = None
        self._can_write: asyncio.Future[None] | None = None

    # -- the request's body --------------------------------------------------------------------------------------

    @property
    def has_body(self) -> bool:
        """Whether all of the body is here already."""
        return self._has_all

    @property
    def missing_bytes(self) -> int | None:
        """How much of the body has not come yet; None where only its end will tell."""
        declared = self.headers.get("content-length")
        return None if declared is None else int(declared) - self._came_bytes

    async def receive(self) -> bytes | bytearray:
        """What has come of the body since; empty at its end. Raises ClientGone."""
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
        """What has come of the body since, without waiting for it."""
        held, self._held = self._held, b""
        if self._is_paused:
            self._is_paused = False
            self._connection.resume_reading()
        return held

    def put(self, piece: bytes) -> None:
        """More of the body has come."""
        self._came_bytes += len(piece)
        if self.is_answered:
            return
        self._held = joined(self._held, piece)
        if len(self._held) > _READ_AHEAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._connection.pause_reading()
        self._wake()

    def put_end(self) -> None:
        """All of the body has come."""
        self._has_all = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the answer ----------------------------------------------------------------------------------------------

    def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """The answer in one piece."""
        self.has_started = True
        has_length = status not in _BODYLESS_STATUSES
        head = self._head(status, headers, b"content-length: %d\r\n" % len(body) if has_length else b"")
        self._write(head if self.method == "HEAD" else head + body)
        self._complete()

    def start(self, status: int, headers: RawHeaders, length_bytes: int | None = None) -> None:
        """Status and headers of an answer whose body follows; `length_bytes` is None where its end alone will tell."""
        self.has_started = True
        has_body = self.method != "HEAD" and status not in _BODYLESS_STATUSES
        self._is_chunked = has_body and length_bytes is None and self.http_version != "1.0"
        length = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        if length_bytes is not None:
            length = b"content-length: %d\r\n" % length_bytes
        elif has_body and not self._is_chunked:
            self.keeps_alive = False  # its end is the connection's
        self._unsent_head = self._head(status, headers, length)

    def write(self, data: bytes) -> bool:
        """A piece of the body, not empty; False where the client does not keep up: then wait until it is `drained`.
        A client that is gone gets nothing, silently."""
        if piece := self._framed(data):
            self._write(piece)
        return self._can_write is None or self.is_gone

    def end(self, data: bytes = b"") -> None:
        """The answer is complete with this last piece of its body."""
        last = self._framed(data) + b"0\r\n\r\n" if self._is_chunked else self._framed(data)
        if last:
            self._write(last)
        self._complete()

    def _framed(self, data: bytes) -> bytes:
        """What goes out with a piece of the body."""
        head, self._unsent_head = self._unsent_head, b""
        if not data or self.method == "HEAD":
            return head
        if self._is_chunked:
            return b"%b%x\r\n%b\r\n" % (head, len(data), data)
        return head + data if head else data

    @property
    def unsent_bytes(self) -> int:
        """What was written and the client has not taken."""
        return 0 if self.is_gone else self._connection.unsent_bytes

    async def drained(self) -> None:
        """Until the client has taken most of what was written, or is gone."""
        while self._can_write is not None and not self.is_gone:
            await asyncio.shield(self._can_write)

    def _head(self, status: int, headers: RawHeaders, length: bytes) -> bytes:
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

    # -- what the connection tells -------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        if self._can_write is None:
            self._can_write = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._can_write is not None:
            waiter, self._can_write = self._can_write, None
            waiter.set_result(None)

    def lost(self) -> None:
        """The client hung up: whoever answers is stopped."""
        self.is_gone = True
        self._wake()
        self.resume_writing()
        if self.stops_when_gone and not self.is_answered:
            self.task.cancel()


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
    """All of it, up to the empty line; `last_lines` are headers too, each with its line end."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"".join((_STATUS_LINES[status], _date_line(int(time.time())), *lines, last_lines, b"\r\n"))
