"""From bytes to requests, by httptools, and the checks of a request's head that httptools leaves out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import cast

import httptools

from gateway.errors import ApiError
from gateway.http.exchange import Exchange

HeaderList = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and headers: the limit of the strictest load balancers."""
_MAX_HEADERS = 256

_HEAD_TOO_LARGE = ApiError(
    431,
    "headers_too_large",
    f"headers: the request line and headers together exceed {MAX_HEAD_BYTES} bytes.",
    "headers",
)
_TOO_MANY_HEADERS = ApiError(431, "headers_too_large", f"headers: there are more than {_MAX_HEADERS}.", "headers")
_UNKNOWN_CODING = ApiError(
    501,
    "unsupported_encoding",
    "transfer-encoding: only `chunked` is understood, given once and alone.",
    "transfer-encoding",
)

_VERSION = b" HTTP/1."
_HEAD_END = b"\r\n\r\n"
_OF_UPGRADES = frozenset({b"connection", b"upgrade", b"http2-settings"})

Begin = Callable[[str, bytes, HeaderList, str, bool], Exchange]
"""Makes an exchange of a head: method, target, headers, version, and whether the client keeps the connection."""


class UnreadableRequest(Exception):
    """A request that cannot be read. Its parser cannot go on."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error)
        self.error = error


class RequestParser:
    """Makes an exchange as soon as a head is complete, and puts the body into it."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._parser = self._new_parser()
        self.receiving: Exchange | None = None
        """The exchange whose body is still coming."""
        self.in_head = False
        self._url = b""
        self._headers: HeaderList = []
        self._quiet_bytes = 0
        """The bytes since the last end of a head or piece of a body: part of an unfinished head, or trailers."""
        self._plain_head = b""
        """The head of a request that asks for another protocol, without the headers that ask."""

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Bytes after a request that asks to close are ignored. Without this, they would be an error of that request.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def close(self) -> None:
        """Nothing is parsed any more. Parser and connection hold each other: without this, only the garbage collector
        would find them, long after a storm of connections."""
        del self._parser, self._begin
        self.receiving = None

    def end_of_piece(self, data: bytes, at: int) -> int:
        """How far to feed `data` from `at` on. The parser cannot be stopped, and it may read only one request.

        This is the end of the head or of the body, or, if that is unknown, the place where another request may begin.
        """
        if self.receiving is None:
            # Two reads may each contain a part of the line that ends the head.
            return _next_request(data, at) if self.in_head else _end_of_head(data, at)
        missing_bytes = self.receiving.missing_bytes
        return _next_request(data, at) if missing_bytes is None else min(len(data), at + missing_bytes)

    def feed(self, piece: bytes | memoryview) -> int:
        """Parse `piece`. Returns how much of it was read: less than all if a request asked for another protocol.

        Raises UnreadableRequest.
        """
        self._quiet_bytes += len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            read_bytes = cast("int", upgrade.args[0])
        except httptools.HttpParserError as error:
            why = error.__context__
            raise (why if isinstance(why, UnreadableRequest) else UnreadableRequest(malformed(str(error)))) from None
        else:
            if self._quiet_bytes > MAX_HEAD_BYTES and (self.in_head or self.receiving is not None):
                raise UnreadableRequest(_HEAD_TOO_LARGE)
            return len(piece)
        # A server may ignore that a client asks for another protocol: the head is parsed again without these headers.
        # This is not inside `except`, where an UnreadableRequest would look like a failure of the parser.
        self._parser = self._new_parser()
        self.feed(self._plain_head)
        return read_bytes

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self.in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # otherwise it is a trailer
            self._headers.append((name.lower(), value))
            if len(self._headers) > _MAX_HEADERS:  # checked here, because one read may bring 60 000
                raise UnreadableRequest(_TOO_MANY_HEADERS)

    def on_headers_complete(self) -> None:
        self.in_head = False
        self._quiet_bytes = 0
        parser = self._parser
        method, version = parser.get_method(), parser.get_http_version()
        if parser.should_upgrade():
            if method == b"CONNECT":  # asks for nothing else
                raise UnreadableRequest(malformed("CONNECT is for proxies"))
            self._plain_head = _without_upgrade(method, self._url, self._headers)
            return
        if (problem := _problem_of(self._url, self._headers, version)) is not None:
            raise UnreadableRequest(problem)
        keeps_alive = version != "1.0" and parser.should_keep_alive()
        self.receiving = self._begin(method.decode("ascii"), self._url, self._headers, version, keeps_alive)

    def on_body(self, body: bytes) -> None:
        self._quiet_bytes = 0
        if self.receiving is not None:
            self.receiving.put(body)

    def on_message_complete(self) -> None:
        self._quiet_bytes = 0
        if self.receiving is not None:  # otherwise its head is parsed again, see `feed`
            self.receiving.put_end()
            self.receiving = None


def malformed(reason: str) -> ApiError:
    """The error for a request that the parser cannot read."""
    return ApiError(400, "invalid_http", f"This is not a well-formed HTTP/1.1 request: {reason}.")


def _problem_of(url: bytes, headers: HeaderList, version: str) -> ApiError | None:
    """Why a request with this head is refused; None if it is not. Its length must have one meaning (RFC 9112, 6.1), and
    it must have one Host (3.2)."""
    if len(url) + sum(map(len, chain.from_iterable(headers))) > MAX_HEAD_BYTES:
        return _HEAD_TOO_LARGE
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names:
        if version == "1.0":
            return malformed("HTTP/1.0 has no Transfer-Encoding")
        # If `chunked` is not the last coding, there is no length at all, and the parser refuses the request.
        codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
        if any(coding != b"chunked" and coding.endswith(b"chunked") for coding in codings):
            return _UNKNOWN_CODING
    hosts = names.count(b"host")
    if version not in ("1.1", "1.0"):
        return malformed("its version is neither HTTP/1.1 nor HTTP/1.0")
    if hosts > 1 or (not hosts and version == "1.1"):
        return malformed("it must have one Host header")
    return None


def _without_upgrade(method: bytes, url: bytes, headers: HeaderList) -> bytes:
    """A head without the headers that ask for another protocol. It also asks to close the connection, so that a
    connection has at most one such request."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] not in _OF_UPGRADES]
    return b"".join([b"%b %b HTTP/1.1\r\n" % (method, url), *lines, b"connection: close\r\n\r\n"])


def _end_of_head(data: bytes, at: int) -> int:
    """Where the head that begins at `at` ends, or the end of `data`. Empty lines may precede the head."""
    line = data.find(_VERSION, at)
    found = data.find(_HEAD_END, line) if line >= 0 else -1
    return found + len(_HEAD_END) if found >= 0 else len(data)


def _next_request(data: bytes, at: int) -> int:
    """Where the next line after `at` begins that may be a request line, or the end of `data`."""
    line_end = data.find(b"\n", at)
    found = data.find(_VERSION, line_end) if line_end >= 0 else -1
    return data.rfind(b"\n", line_end, found) + 1 if found >= 0 else len(data)
