"""The answer to one client, as far as it has got."""

from __future__ import annotations

import time
from collections.abc import Iterable

from gateway.asgi import RawHeaders, Send
from gateway.errors import ApiError
from gateway.routing.router import Ticket
from gateway.sse import error_event
from gateway.upstream import Answer

_NOT_PASSED = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "server",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
    }
)


class Reply:
    """Sends status, headers and body once, and remembers what the log and the metrics need."""

    def __init__(self, send: Send, request_id: str, started: float) -> None:
        self.send = send
        self.request_id = request_id
        self.status = 0
        self.code = ""
        self.replica = ""
        self.decision = ""
        self.receipt: RawHeaders = []
        self.first_byte_s: float | None = None
        self.has_started = False
        self.is_complete = False
        self._started = started

    def note(self, ticket: Ticket, visible: bool) -> None:
        """The decision behind this answer; its headers only where the caller may see them."""
        self.replica, self.decision = ticket.replica, ticket.decision
        if visible:
            self.receipt = [
                (b"x-kvgate-replica", ticket.replica.encode()),
                (b"x-kvgate-matched-tokens", str(ticket.matched_tokens).encode()),
                (b"x-kvgate-next-boundary-tokens", str(ticket.boundary_tokens).encode()),
                (b"x-kvgate-decision", ticket.decision.encode()),
            ]

    async def whole(self, status: int, upstream_headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """An answer in one piece."""
        await self._start(status, [*upstream_headers, (b"content-length", str(len(body)).encode())])
        await self.send({"type": "http.response.body", "body": body})

    async def start_stream(self, answer: Answer) -> None:
        self.first_byte_s = time.perf_counter() - self._started
        await self._start(answer.status, passed_headers(answer))

    async def more(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        self.is_complete = True
        await self.send({"type": "http.response.body", "body": b""})

    async def end_with_error(self, error: ApiError) -> None:
        """A stream that broke ends with an error event, so that nobody takes it for complete."""
        if self.is_complete:
            return
        await self.more(error_event(error.body()))
        await self.end()

    async def _start(self, status: int, headers: RawHeaders) -> None:
        self.status, self.has_started = status, True
        headers += [(b"x-request-id", self.request_id.encode()), *self.receipt]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})


def passed_headers(answer: Answer) -> RawHeaders:
    """The replica's headers that are the client's business."""
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in answer.headers.items()
        if name.lower() not in _NOT_PASSED and not name.lower().startswith("x-kvgate-")
    ]
