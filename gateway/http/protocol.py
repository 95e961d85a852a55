"""A client's connection: HTTP/1.1, one request at a time.

While a request is being answered, the bytes after it are kept unparsed, up to a limit, and parsed in their turn. So the
socket is always read, a client that hangs up is noticed, and a connection holds one request, however many are sent at
once. docs/adr/0006-hot-path.md compares the cost with uvicorn's own protocol; uvicorn still runs the server.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
import structlog
from uvicorn.server import ServerState

from gateway.errors import ApiError
from gateway.http.exchange import Exchange, answer_head
from gateway.http.parser import HeaderList, RequestParser, UnreadableRequest, malformed

_log = structlog.get_logger("kvgate.http")

MAX_KEPT_BYTES = 64 * 1024
"""Of bytes after the request that is being answered."""
IDLE_S = 75.0
_FIRST_REQUEST_S = 1.0
"""A new connection has this time for its first request while the server stops: whoever connects is about to ask."""
_LINGER_S = 2.0
_FAREWELL_S = 0.5
_PROBE_S = 0.25
_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
_NO_LINGERING = struct.pack("ii", 1, 0)

Handler = Callable[[Exchange], Awaitable[None]]
"""Answers an exchange in every case."""


class HttpProtocol(asyncio.Protocol):
    """One client connection. It is aborted when the client takes none of the unsent bytes for `write_s`."""

    def __init__(self, handle: Handler, state: ServerState, write_s: float) -> None:
        self._handle = handle
        self._connections: set[Any] = state.connections
        self._tasks = state.tasks
        self._write_s = write_s
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(self._begin)
        self._answering: Exchange | None = None
        self._is_new = True
        """No request has come yet."""
        self._kept = bytearray()
        self._is_closing = False
        self._is_deaf = False
        """Incoming bytes are ignored; only the end of the connection counts."""
        self._is_full = False
        """The write buffer is full: no further request begins until the client has taken enough of it."""
        self._is_half_closed = False
        self._watched_bytes = 0
        """The unsent bytes at the last check, plus those written since."""
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        name = transport.get_extra_info("peername")
        self._peer = str(name[0]) if isinstance(name, tuple) else ""  # that of a Unix socket is no tuple
        self._idle_since_s = self._loop.time()
        self._call_later("idle", IDLE_S, self._close_if_idle)

    def data_received(self, data: bytes) -> None:
        if not self._is_deaf:
            self._read(data)

    def eof_received(self) -> bool:
        """The client closed its half of the connection: it is gone, or it still waits for its answer.

        An interim response tells the two apart: a waiting client ignores it, and for a client that is gone, its host
        answers with a reset, so that the next write fails. HTTP/1.0 has no interim responses, and none may follow once
        an answer has begun: in these cases the client counts as gone. With TLS it does, too: neither half of such a
        connection lives without the other.
        """
        exchange = self._answering
        if exchange is None:
            return False
        if self._is_tls or not exchange.has_body or exchange.has_started or exchange.http_version == "1.0":
            self._transport.abort()
            return False
        self._is_half_closed = True
        self._probe()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._be_deaf()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._answering is not None:
            self._give_up(self._answering)
        self._parser.close()

    def pause_writing(self) -> None:
        self._is_full = True
        self._watch_unsent(self.unsent_bytes)
        if self._answering is not None:
            self._answering.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        if not self._transport.is_closing():
            self._timers["unsent"].cancel()
        if self._answering is not None:
            self._answering.resume_writing()
        else:
            self._go_on()

    def shutdown(self) -> None:
        """The server stops: close after the request that is being answered, or whose head has begun to come, or that a
        new connection is about to bring. Calling it again does no harm."""
        self._is_closing = True
        if self._answering is not None:
            self._answering.keeps_alive = False
        elif not self._parser.in_head and not self._is_deaf:
            wait_s = self._idle_since_s + _FIRST_REQUEST_S - self._loop.time() if self._is_new else 0
            if wait_s > 0:
                self._call_later("first request", wait_s, self.shutdown)
            else:
                self._close()

    # -- time ----------------------------------------------------------------------------------------------------

    def _call_later(self, name: str, wait_s: float, callback: Callable[[], None]) -> None:
        if (timer := self._timers.get(name)) is not None:
            timer.cancel()
        self._timers[name] = self._loop.call_later(wait_s, callback)

    def _close_if_idle(self) -> None:
        """Close the connection after IDLE_S without an answer. A head that comes slowly does not count."""
        wait_s = IDLE_S
        if self._answering is None:
            wait_s = self._idle_since_s + IDLE_S - self._loop.time()
        if wait_s <= 0:
            self._close()
        else:
            self._call_later("idle", wait_s, self._close_if_idle)

    def _watch_unsent(self, unsent_bytes: int) -> None:
        self._watched_bytes = unsent_bytes
        self._call_later("unsent", self._write_s, self._abort_if_stalled)

    def _abort_if_stalled(self) -> None:
        unsent_bytes = self.unsent_bytes
        if unsent_bytes < self._watched_bytes:
            self._watch_unsent(unsent_bytes)
        else:
            self._transport.abort()

    def _probe(self) -> None:
        exchange = self._answering
        if exchange is not None and not exchange.has_started and exchange.http_version != "1.0":
            self._transport.write(_PROBE)
        self._call_later("probe", _PROBE_S, self._probe)

    # -- incoming bytes ------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        """Parse requests until one is complete and not answered yet. The parser cannot be stopped, so that it gets the
        bytes of one request at a time (see `RequestParser.end_of_piece`)."""
        at, size = 0, len(data)
        while at < size and not self._is_deaf:
            receiving = self._parser.receiving
            if receiving is None and (self._answering is not None or self._is_full):
                self._keep(data[at:])
                return
            end = self._parser.end_of_piece(data, at)
            try:
                at += self._parser.feed(data if end - at == size else memoryview(data)[at:end])
            except UnreadableRequest as refused:
                self._refuse(refused.error)

    def _keep(self, data: bytes) -> None:
        """Keep bytes until the request before them is answered."""
        self._kept += data
        if len(self._kept) > MAX_KEPT_BYTES:
            self._be_deaf()
            if self._answering is None:
                self._close()
            else:
                self._answering.keeps_alive = False

    def _be_deaf(self) -> None:
        self._is_deaf = True
        self._kept.clear()

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that cannot be read. If another one is being answered, close after its answer instead."""
        self._be_deaf()
        exchange, receiving = self._answering, self._parser.receiving
        if exchange is not None and exchange is not receiving:
            exchange.keeps_alive = False
        elif exchange is not None and exchange.has_started:
            self._transport.abort()  # the client must not take the part that was sent for a complete answer
        else:
            if exchange is receiving:  # otherwise it was answered before its body had come
                body = error.body()
                last_lines = b"content-length: %d\r\nconnection: close\r\n" % len(body)
                head = answer_head(error.status, [(b"content-type", b"application/json")], last_lines)
                self._transport.write(head + body)
            if exchange is not None:
                self._give_up(exchange)
            self._linger()

    # -- requests and answers ------------------------------------------------------------------------------------

    def _begin(self, method: str, target: bytes, headers: HeaderList, version: str, keeps_alive: bool) -> Exchange:
        if self._answering is not None:  # only input that is not HTTP/1 gets here
            raise UnreadableRequest(malformed("it does not wait for its turn"))
        self._is_new = False
        try:
            url = httptools.parse_url(target)
            path = url.path.decode("ascii") if url.path else ""
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            raise UnreadableRequest(malformed("its target is no URL")) from None
        exchange = self._answering = Exchange(
            self,
            self._loop,
            method,
            unquote(path) if "%" in path else path,
            url.query or b"",
            headers,
            version,
            keeps_alive and not self._is_closing,
            self._peer,
            "https" if self._is_tls else "http",
        )
        exchange.task = self._loop.create_task(self._run(exchange))
        self._tasks.add(exchange.task)
        return exchange

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._handle(exchange)
        except Exception as error:
            # Only the type and the place: an exception's text may contain a piece of the prompt.
            place = traceback.extract_tb(error.__traceback__)[-1]
            _log.error("handler failed", error=type(error).__name__, at=f"{place.filename}:{place.lineno}")
        finally:
            self._tasks.discard(exchange.task)
            if self._answering is exchange:  # unfinished: the client must not take the sent part for complete
                _reset(self._transport) if exchange.has_started else self._transport.abort()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        if self._is_full:
            self._watched_bytes += len(data)
        self._transport.write(data)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing() and not self._is_half_closed:
            self._transport.resume_reading()

    def _give_up(self, exchange: Exchange) -> None:
        """Detach the exchange. Its further writes do nothing."""
        self._answering = None
        exchange.lost()

    def answered(self, exchange: Exchange) -> None:
        if exchange is not self._answering:
            return
        self._answering = None
        self._idle_since_s = self._loop.time()
        if exchange.keeps_alive:
            self.resume_reading()  # its body may have been paused
            self._go_on()
        elif (self._is_deaf or self._parser.receiving is not None) and not self._is_half_closed:
            self._linger()
        else:
            self._close()

    def _go_on(self) -> None:
        """Read the kept bytes. If the client has closed its half and they hold no complete request, close."""
        if self._is_full or self._transport.is_closing():
            return
        if self._kept:
            data = bytes(self._kept)
            self._kept.clear()
            self._read(data)
        if self._is_half_closed and (self._answering is None or self._parser.receiving is not None):
            self._close()

    def _close(self) -> None:
        """Close as soon as the client has taken the unsent bytes."""
        self._be_deaf()
        self._transport.close()
        if unsent_bytes := self.unsent_bytes:
            self._watch_unsent(unsent_bytes)
        elif self._is_tls:  # it would wait for the client's farewell for half a minute, and an idle client sends none
            self._call_later("farewell", _FAREWELL_S, self._transport.abort)

    def _linger(self) -> None:
        """Close after the client stops sending, or after _LINGER_S. Closing with unread bytes resets the connection,
        and the client may lose its answer (RFC 9112, 9.6)."""
        self._be_deaf()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self._call_later("linger", _LINGER_S, self._close)


def _reset(transport: asyncio.Transport) -> None:
    """End a connection with a reset. For HTTP/1.0, a normal end of the connection marks the end of the answer."""
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
    transport.abort()
