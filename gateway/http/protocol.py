"""A client's connection: HTTP/1.1, parsed by httptools.

A request's head is limited, errors have this API's shape, pipelined requests wait for their turn, and a connection on
which nothing is being answered is closed after a while. What uvicorn's own protocol costs beside this one is in
docs/adr/0006-hot-path.md; uvicorn still runs the server.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
import structlog
from uvicorn.server import ServerState

from gateway.errors import ApiError
from gateway.http.exchange import Exchange

_log = structlog.get_logger("kvgate.http")

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; as much as the strictest load balancers in front allow."""
IDLE_S = 75.0

_MALFORMED = ApiError(400, "invalid_http", "This is not a well-formed HTTP/1.1 request.")
_HEAD_TOO_LARGE = ApiError(
    431,
    "headers_too_large",
    f"headers: the request line and headers together exceed {MAX_HEAD_BYTES} bytes.",
    "headers",
)

_NO_LINGERING = struct.pack("ii", 1, 0)
_OF_UPGRADES = frozenset({b"connection", b"upgrade", b"http2-settings"})

Handler = Callable[[Exchange], Awaitable[None]]
"""Answers a request, whatever happens."""


class HeadTooLarge(Exception):
    """Raised out of the parser, which then stops."""


class HttpProtocol(asyncio.Protocol):
    """One client connection."""

    def __init__(self, handle: Handler, state: ServerState) -> None:
        self._handle = handle
        self._connections: set[Any] = state.connections
        self._tasks = state.tasks
        self._loop = asyncio.get_running_loop()
        self._parser = self._new_parser()
        self._answering: Exchange | None = None
        self._receiving: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._is_closing = False
        self._is_full = False
        """The client has not taken what was written: nothing more is begun until it has."""
        self._in_head = False
        self._head_bytes = 0
        """What has arrived of a head that is not complete; at most one read too many."""
        self._had_body = self._had_end = False
        """Whether the read that is being parsed brought a piece of a body, or the end of a request."""
        self._plain_head = b""
        """Of a request that wants to change the protocol: its head without that."""
        self._is_deaf = False
        self._unsent_bytes = 0
        self._refusal = _MALFORMED

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # What follows a request that asks to close is ignored; without this, it would spoil that one's answer.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        self._idle_since_s = self._loop.time()
        self._timer = self._loop.call_later(IDLE_S, self._close_if_idle)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._had_body = self._had_end = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Never agreed to, as HTTP allows: the request is read again as one that did not ask.
            self._parser = self._new_parser()
            self.data_received(self._plain_head + data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal)
            return
        # Beside heads, trailers: whatever comes for long without being a body.
        if (self._in_head or self._receiving is not None) and not (self._had_body or self._had_end):
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._timer.cancel()
        self._waiting.clear()
        if self._answering is not None:
            self._answering.lost()

    def pause_writing(self) -> None:
        self._is_full = True
        if self._answering is not None:
            self._answering.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._answering is not None:
            self._answering.resume_writing()
        else:
            self._go_on()

    def shutdown(self) -> None:
        """uvicorn stops: close when what is being answered, or has begun to come, is complete."""
        self._is_closing = True
        if self._answering is not None:
            self._answering.keeps_alive = False
        elif not self._in_head:
            self._transport.close()

    def _close_if_idle(self) -> None:
        """Where nothing is being answered; at once where the client has stopped taking what it was answered."""
        wait_s = IDLE_S
        if self._answering is None:
            wait_s = self._idle_since_s + IDLE_S - self._loop.time()
        if wait_s <= 0:
            before, self._unsent_bytes = self._unsent_bytes, self._transport.get_write_buffer_size()
            if self._transport.is_closing() and self._unsent_bytes >= before:
                self._transport.abort()
                return
            self._transport.close()
            wait_s = IDLE_S
        self._timer = self._loop.call_later(wait_s, self._close_if_idle)

    def _refuse(self, error: ApiError) -> None:
        """What cannot be read is answered, unless something else is being answered: then that is the last."""
        if self._transport.is_closing():
            return
        if self._answering is not None and self._answering is not self._receiving:
            self._is_deaf = True
            self._answering.keeps_alive = False
            self._waiting.clear()
            return
        if self._answering is not None and self._answering.has_started:
            self._transport.abort()  # what was answered so far must not be taken for complete
            return
        body = error.body()
        head = f"HTTP/1.1 {error.status} {error.code}\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self._transport.close()

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head, self._head_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self._url) + sum(len(name) + len(value) for name, value in self._headers) > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
            raise HeadTooLarge
        parser = self._parser
        if parser.should_upgrade():
            self._plain_head = _without_upgrade(parser.get_method(), self._url, self._headers)
            return
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii") if url.path else ""
        version = parser.get_http_version()
        exchange = Exchange(
            self,
            self._loop,
            parser.get_method().decode("ascii"),
            unquote(path) if "%" in path else path,
            url.query or b"",
            self._headers,
            version,
            version != "1.0" and parser.should_keep_alive() and not self._is_closing,
        )
        self._receiving = exchange
        if self._answering is None and not self._is_full:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            self._transport.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._had_body, self._head_bytes = True, 0
        if self._receiving is not None:
            self._receiving.put(body)

    def on_message_complete(self) -> None:
        self._had_end = True
        if self._receiving is not None:
            self._receiving.put_end()
            self._receiving = None

    # -- what an exchange asks for -------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing() and not self._waiting:
            self._transport.resume_reading()

    def _begin(self, exchange: Exchange) -> None:
        self._answering = exchange
        task = exchange.task = self._loop.create_task(self._run(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._handle(exchange)
        except Exception as error:
            # Where, not what: an exception's text may hold a piece of the prompt.
            place = traceback.extract_tb(error.__traceback__)[-1]
            _log.error("handler failed", error=type(error).__name__, at=f"{place.filename}:{place.lineno}")
        finally:
            if not exchange.is_answered:  # the client is gone, or what it got so far must not be taken for complete
                self._cut(exchange)

    def _cut(self, exchange: Exchange) -> None:
        """Reset the connection, if an answer has begun: HTTP/1.0 takes a connection's end for that of the answer."""
        sock = self._transport.get_extra_info("socket")
        if exchange.has_started and sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self._transport.abort()

    def answered(self, exchange: Exchange) -> None:
        self._answering = None
        self._idle_since_s = self._loop.time()
        if not exchange.keeps_alive:
            self._transport.close()
        else:
            self._go_on()

    def _go_on(self) -> None:
        """The next of the requests that came together, or more from the socket."""
        if self._is_full or self._transport.is_closing():
            return
        if self._waiting:
            self._begin(self._waiting.popleft())
        self.resume_reading()


def _without_upgrade(method: bytes, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A request's head again, without what asks for another protocol. CONNECT is nothing but that: malformed here."""
    if method == b"CONNECT":
        raise httptools.HttpParserInvalidMethodError
    asks_to_close = any(name == b"connection" and b"close" in value.lower() for name, value in headers)
    lines = [b"%b %b HTTP/1.1\r\n" % (method, url)]
    lines += [b"%b: %b\r\n" % header for header in headers if header[0] not in _OF_UPGRADES]
    return b"".join([*lines, b"connection: close\r\n\r\n" if asks_to_close else b"\r\n"])
