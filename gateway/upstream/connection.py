"""One HTTP/1.1 connection to a replica, with one request at a time. httptools parses the answer."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import cast

import httptools

from coordinator.engine.sockets import notice_gone_host
from gateway.deadlines import Deadlines
from gateway.upstream.answer import Answer
from gateway.upstream.errors import UpstreamError

Buffer = bytes | bytearray | memoryview

MAX_HEAD_BYTES = 2**20
"""Of an answer's headers. vLLM describes embeddings of `encoding_format: bytes` in a header: 120 bytes for each."""
_USUAL_HEAD_BYTES = 2**16
"""A larger head counts as held (`limits.max_buffered_bytes`)."""
_MAX_QUIET_BYTES = 2 * MAX_HEAD_BYTES
"""Of a head without an end, or of trailers. It is more than MAX_HEAD_BYTES, so that the result for a head does not
depend on the pieces in which it comes."""
_COPIED_BYTES = 2**16
_LAST_STATUS = 599
_BODYLESS_STATUSES = frozenset({204, 304})
_READ_HEADERS = frozenset({b"content-length", b"transfer-encoding", b"keep-alive"})
_TIMEOUT = re.compile(rb"(?i)(?:^|[,;\s])timeout\s*=\s*\"?(\d{1,9})")
_SAFE_SHARE = 0.8
"""The part of a server's own `Keep-Alive: timeout` in which a request still reaches it."""
_REQUEST_TIMEOUT = 408


class Connection(asyncio.Protocol):
    """A connection. It calls `on_idle` when an answer is complete; then `send` may be called again."""

    def __init__(self, on_idle: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self.is_open = False
        self.ended_s = 0.0
        """When its last answer was complete (monotonic time). 0 if there was none."""
        self.kept_until_s = 0.0
        """How long it may be used again while it is idle (monotonic time)."""
        self.server_keeps_s = math.inf
        """How long its server keeps it idle, with a margin, as far as the server has said so."""
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._answer: Answer | None = None
        self._body: list[bytes] = []

    def send(self, head: bytes, body: Sequence[Buffer], is_head: bool, deadlines: Deadlines, idle_s: float) -> Answer:
        """Send a request. The returned answer is still empty."""
        self._answer = answer = Answer(self, self._loop, deadlines, idle_s)
        self._is_head = is_head
        self._has_length = self._keeps_alive = self._is_over = self._has_surplus = False
        self._quiet_bytes = 0
        if sum(map(len, body)) <= _COPIED_BYTES:
            self._transport.write(b"".join((head, *body)))  # one system call
        else:
            for piece in (head, *body):
                self._transport.write(piece)
        return answer

    # -- called by the answer ------------------------------------------------------------------------------------

    def pause(self) -> None:
        if self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    def abort(self) -> None:
        self._answer = None
        self.is_open = False
        self._transport.abort()

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self.is_open = True
        notice_gone_host(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # no request is running: these bytes must not answer the next one
            self.abort()
            return
        had_head = answer.has_head
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raised_here = error.__context__  # by a callback below
            self._fail(raised_here if isinstance(raised_here, UpstreamError) else UpstreamError("protocol", str(error)))
            return
        if answer.has_head and not had_head:
            if self._quiet_bytes + len(data) > _USUAL_HEAD_BYTES and not self._weigh_head(answer):
                return
            answer.wake()
        if self._body:
            pieces, self._body = self._body, []
            answer.put(pieces[0] if len(pieces) == 1 else b"".join(pieces), is_last=self._is_over)
        elif not self._is_over:
            self._quiet_bytes += len(data)
            if self._quiet_bytes > _MAX_QUIET_BYTES:
                self._fail(_too_large())
                return
        if self._is_over:
            self._finish(answer)

    def _weigh_head(self, answer: Answer) -> bool:
        """Notes the size of a large head. If it is too large, this fails the answer and returns False."""
        size_bytes = sum(len(name) + len(value) + 4 for name, value in answer.headers)
        if size_bytes > MAX_HEAD_BYTES:
            self._fail(_too_large())
            return False
        if size_bytes > _USUAL_HEAD_BYTES:
            answer.head_bytes = size_bytes
        return True

    def _finish(self, answer: Answer) -> None:
        if self._answer is None:  # the caller gave it up while it took its last piece
            return
        self._answer = None
        if self._keeps_alive and self.is_open and not self._has_surplus:
            self._transport.resume_reading()  # an idle connection is read, so that its end is noticed
            self.ended_s = time.monotonic()
            self._on_idle(self)
        else:
            self._close()
        answer.end()

    def _close(self) -> None:
        self.is_open = False
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        answer, self._answer = self._answer, None
        if answer is not None:
            if answer.has_head and not self._has_length and exc is None:  # such a body ends with the connection
                answer.end()
            else:
                is_stale = self.ended_s > 0 and not answer.has_head and self._quiet_bytes == 0
                answer.fail(UpstreamError("stale" if is_stale else "reset", str(exc) if exc else self._closed(answer)))
        self._on_lost(self)

    def _closed(self, answer: Answer) -> str:
        """What it may mean that the replica ends the connection without a word. With TLS 1.3, a server that misses its
        client's certificate says so after the handshake."""
        wants_certificate = not answer.has_head and self._transport.get_extra_info("ssl_object") is not None
        hint = " (if it wants to see a certificate, set replica_tls)" if wants_certificate else ""
        return f"the replica closed the connection{hint}"

    def _fail(self, error: UpstreamError) -> None:
        answer = self._answer
        self.abort()
        if answer is not None:
            answer.fail(error)

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._has_surplus = self._is_over  # bytes after the answer belong to no request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is None or self._answer.has_head:  # trailers
            return
        name = name.lower()
        if name in _READ_HEADERS:
            self._read_header(name, value)
        self._answer.headers.append((name, value))

    def _read_header(self, name: bytes, value: bytes) -> None:
        if name == b"keep-alive":
            if told := _TIMEOUT.search(value):
                self.server_keeps_s = _SAFE_SHARE * int(told[1])
            return
        if name == b"transfer-encoding" and value.lower() != b"chunked":
            raise UpstreamError("protocol", "a transfer-encoding other than chunked: the end of its body is unknown")
        self._has_length = True

    def on_headers_complete(self) -> None:
        answer = self._answer
        if answer is None or answer.has_head:
            return
        status = self._parser.get_status_code()
        if status < 200:  # an interim answer
            answer.headers, self._has_length = [], False
            return
        if status > _LAST_STATUS:
            raise UpstreamError("protocol", f"a status of {status}")
        if status == _REQUEST_TIMEOUT and self.ended_s:  # said to an idle connection, while the request was on its way
            raise UpstreamError("stale", "the replica closed the connection for want of a request")
        answer.status, answer.has_head = status, True
        self._keeps_alive = self._parser.should_keep_alive() and not self._is_head
        self._is_over = self._is_head or status in _BODYLESS_STATUSES

    def on_body(self, data: bytes) -> None:
        if not self._is_head and not self._has_surplus:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._answer is not None and self._answer.has_head:
            self._is_over = True


def _too_large() -> UpstreamError:
    return UpstreamError("head_too_large", f"headers of more than {MAX_HEAD_BYTES} bytes")
