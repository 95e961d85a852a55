"""The near end of a call: a client's request, and its answer. Envoy has the client's connection."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.http.exchange import ClientConnection, Exchange, RawHeaders
from gateway.picker.words import RequestHead


class NearEnd(ClientConnection, Protocol):
    """Takes an answer for a client."""

    def answer_whole(self, status: int, headers: RawHeaders, body: bytes) -> None: ...

    def answer_begins(self, status: int, headers: RawHeaders, length_bytes: int | None) -> None: ...

    def answer_piece(self, piece: bytes, *, is_last: bool) -> None: ...


class PickedExchange(Exchange):
    """An exchange whose answer is told to Envoy, which frames it."""

    __slots__ = ("_near",)

    def __init__(self, near: NearEnd, loop: asyncio.AbstractEventLoop, head: RequestHead) -> None:
        super().__init__(
            near, loop, head.method, head.path, head.query, head.headers, "2", True, head.peer, head.scheme
        )
        self._near = near

    def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        self.has_started = True
        if not self.is_gone:
            self._near.answer_whole(status, [*headers, *self.added_headers], b"" if self.method == "HEAD" else body)
        self._complete()

    def start(self, status: int, headers: RawHeaders, length_bytes: int | None = None) -> None:
        self.has_started = True
        if not self.is_gone:
            self._near.answer_begins(status, [*headers, *self.added_headers], length_bytes)

    def write(self, data: bytes) -> bool:
        if not self.is_gone:
            self._near.answer_piece(data, is_last=False)
        return self._can_write is None or self.is_gone

    def end(self, data: bytes = b"") -> None:
        if not self.is_gone:
            self._near.answer_piece(data, is_last=True)
        self._complete()
