"""Requests out of bytes, by httptools."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import httptools

from gateway.errors import ApiError
from gateway.http.exchange import Exchange
from gateway.http.request_head import (
    HEAD_TOO_LARGE,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    TOO_MANY_HEADERS,
    RawHeaders,
    end_of_head,
    malformed,
    next_request,
    problem_of,
    without_upgrade,
)

Begin = Callable[[str, bytes, RawHeaders, str, bool], Exchange]
"""Makes the exchange of a head: method, target, headers, version, and whether the client keeps the connection."""


class UnreadableRequest(Exception):
    """A request that cannot be read; its parser is of no more use."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error)
        self.error = error


class RequestParser:
    """Has an exchange made as soon as a head is complete, and gives it the body that follows."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._parser = self._new_parser()
        self.receiving: Exchange | None = None
        """Whose body has not come to its end."""
        self.in_head = False
        self._url = b""
        self._headers: RawHeaders = []
        self._quiet_bytes = 0
        """What has come since the last piece of a body, or end of a head or request: unfinished heads, trailers."""
        self._plain_head = b""
        """Of a request that wants to change the protocol: its head without that."""

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # What follows a request that asks to close is ignored; without this, it would spoil that one's answer.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def end_of_piece(self, data: bytes, at: int) -> int:
        """How far to feed what lies behind `at`: the parser cannot be stopped, and one request is read at a time. To
        the end of a head, or of a body; where that is not known, to where another request may begin."""
        if self.receiving is None:
            # The end of a head that has begun may lie in two reads.
            return next_request(data, at) if self.in_head else end_of_head(data, at)
        missing_bytes = self.receiving.missing_bytes
        return next_request(data, at) if missing_bytes is None else min(len(data), at + missing_bytes)

    def feed(self, piece: bytes | memoryview) -> int:
        """How much of it was read: not all where a request that wants to change the protocol was read again. Raises
        Refused."""
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
                raise UnreadableRequest(HEAD_TOO_LARGE)
            return len(piece)
        # An upgrade is never agreed to, as HTTP allows: the request is read again as one that did not ask. Not within
        # `except`: what is refused then would be told as a failure of the parser.
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
        if self.in_head:  # else a trailer
            self._headers.append((name.lower(), value))
            if len(self._headers) > MAX_HEADERS:  # now, not at their end: one read may bring 60 000
                raise UnreadableRequest(TOO_MANY_HEADERS)

    def on_headers_complete(self) -> None:
        self.in_head = False
        self._quiet_bytes = 0
        parser = self._parser
        method, version = parser.get_method(), parser.get_http_version()
        if parser.should_upgrade():
            if method == b"CONNECT":  # nothing but a change of the protocol
                raise UnreadableRequest(malformed("CONNECT is for proxies"))
            self._plain_head = without_upgrade(method, self._url, self._headers)
            return
        if (problem := problem_of(self._url, self._headers, version)) is not None:
            raise UnreadableRequest(problem)
        keeps_alive = version != "1.0" and parser.should_keep_alive()
        self.receiving = self._begin(method.decode("ascii"), self._url, self._headers, version, keeps_alive)

    def on_body(self, body: bytes) -> None:
        self._quiet_bytes = 0
        if self.receiving is not None:
            self.receiving.put(body)

    def on_message_complete(self) -> None:
        self._quiet_bytes = 0
        if self.receiving is not None:  # else one that wants to change the protocol, and is read again
            self.receiving.put_end()
            self.receiving = None
