"""The answer to one client, while it is sent."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import orjson

from gateway.endpoints import Api
from gateway.errors import ApiError
from gateway.http.exchange import Exchange
from gateway.relay.audit import Usage
from gateway.relay.error_shapes import error_body, error_event
from gateway.relay.sse import next_sequence_number
from gateway.request.job import Job
from gateway.routing.ticket import Ticket
from gateway.tracing.untraced import UNTRACED, Untraced
from gateway.upstream import Answer

_NOT_PASSED = frozenset(
    {
        # of one connection, or the gateway's own
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"proxy-authenticate",
        b"request-id",
        b"server",
        b"set-cookie",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
        # what browsers obey for all of an origin, and proxies for themselves
        b"accept-ch",
        b"activate-storage-access",
        b"alt-svc",
        b"clear-site-data",
        b"critical-ch",
        b"expect-ct",
        b"nel",
        b"origin-agent-cluster",
        b"public-key-pins",
        b"public-key-pins-report-only",
        b"refresh",
        b"report-to",
        b"reporting-endpoints",
        b"service-worker-allowed",
        b"set-cookie2",
        b"set-login",
        b"speculation-rules",
        b"strict-transport-security",
        b"x-lighttpd-send-file",
    }
)
_NOT_PASSED_BEGINNINGS = (
    *(b"x-kvgate-", b"access-control-", b"x-ratelimit-", b"x-accel-", b"x-envoy-", b"proxy-"),
    *(b"x-sendfile", b"x-reproxy-", b"x-litespeed-", b"surrogate-", b"cdn-", b"edge-"),
)
"""What the gateway says itself, and what nginx, Envoy and others obey."""
_MAX_ID_CHARS = 128
_PRINTABLE = bytes(range(0x20, 0x7F))
"""A header may have these as they are."""
# Without these headers, nginx and other proxies collect tokens and deliver many at once.
_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"),)
_STILL_WAITING = b": waiting\n\n"
"""A comment, which every reader of server-sent events ignores."""
_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

RawHeaders = list[tuple[bytes, bytes]]


class Reply:
    """Sends status, headers and body once. Remembers what the access log and the metrics need."""

    def __init__(self, exchange: Exchange, api: Api, started: float) -> None:
        self.request_id = request_id(exchange.headers)
        self.trace: Untraced = UNTRACED
        self.status = 0
        self.code = ""
        self.over_budget: dict[str, Any] | None = None
        self.job: Job | None = None
        """None until the request was read."""
        self.tickets: Sequence[Ticket] = ()
        """Its attempts so far."""
        self.resumed: list[dict[str, str]] = []
        """The replicas that broke the answer off: `replica`, `why`, `how` it went on elsewhere (`none`: it did not),
        and then `why_not`. `how` is missing while nobody knows."""
        self.usage: Usage | None = None
        """What the engine told of the answer, at its end."""
        self.cached_tokens: int | None = None
        """Prompt tokens that the engine had cached, if that is known."""
        self.receipt: RawHeaders = []
        self.first_byte_s: float | None = None
        self.object_noting: asyncio.Future[Any] | None = None
        """Done when Redis remembers the object that the answer has made; None if it has made none so far."""
        self.numbered_events = b""
        """Of a streamed response: the last events that have sequence numbers."""
        self._exchange = exchange
        self._api = api
        self._started = started
        self._has_events = False
        self._quiet_since_s = 0.0

    def note(self, ticket: Ticket, visible: bool) -> None:
        """Adds the headers of the decision behind this answer, if the caller may see them. Every caller sees what is
        left of its limits, and the served model if it has another name."""
        limits = ticket.limit_headers
        self.receipt = [(name.encode(), value.encode()) for name, value in limits.items()] if limits else []
        if ticket.other_name:
            self.receipt.append((b"x-kvgate-model", quote(ticket.other_name, safe=_PRINTABLE).encode()))
        if visible:
            self.receipt += [
                (b"x-kvgate-replica", ticket.replica.encode()),
                (b"x-kvgate-matched-tokens", str(ticket.matched_tokens).encode()),
                (b"x-kvgate-next-boundary-tokens", str(ticket.boundary_tokens).encode()),
                (b"x-kvgate-decision", ticket.decision.encode()),
            ]

    def broke_off(self, replica: str, why: str) -> None:
        """Notes that a replica broke the answer off, unless that was for the rest, of which nothing had come."""
        if not self.resumed or "how" in self.resumed[-1]:
            self.resumed.append({"replica": replica, "why": why})

    @property
    def task(self) -> asyncio.Task[None]:
        """The task that answers."""
        return self._exchange.task

    @property
    def has_started(self) -> bool:
        return self._exchange.has_started

    @contextmanager
    def kept_alive(self, every_s: float) -> Iterator[None]:
        """Inside the context, a stream that has not begun gets a comment each `every_s`, so that nobody takes its
        connection for dead. The first one begins the answer, so its status is 200 whatever comes."""
        loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()

        def comment() -> None:
            self._begin_events([*_STREAM, *_UNBUFFERED])
            self._exchange.write(_STILL_WAITING)
            self._quiet_since_s = loop.time()
            timers[:] = [loop.call_later(every_s, comment)]

        self._quiet_since_s = self._quiet_since_s or loop.time()  # it may wait several times
        timers.append(loop.call_at(self._quiet_since_s + every_s, comment))
        try:
            yield
        finally:
            timers[0].cancel()

    def _begin_events(self, headers: RawHeaders) -> None:
        """Begins a stream of events, unless a comment has begun it."""
        if not self._has_events:
            self._has_events, self.status = True, 200
            self._exchange.start(200, [*headers, *self._own_headers()])

    def whole(self, status: int, upstream_headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Sends an answer in one piece."""
        if self._has_events:
            self.refuse(_as_error(status, body))
            return
        self.status = status
        self.trace.passed(body)
        self._exchange.whole(status, [*upstream_headers, *self._own_headers()], body)

    def start_stream(self, answer: Answer) -> None:
        """Begins a stream of events. Does nothing if it goes on at another replica."""
        if self.first_byte_s is not None:
            return
        self.first_byte_s = time.perf_counter() - self._started
        headers = passed_headers(answer)
        given = {name for name, _ in headers}
        self._begin_events([*headers, *(header for header in _UNBUFFERED if header[0] not in given)])

    def start_body(self, answer: Answer, length_bytes: int | None) -> None:
        """Begins an answer that is no stream of events. `length_bytes` is None if the length is not known."""
        if self._has_events:
            raise _as_error(answer.status, b"")
        self.status = answer.status
        self._exchange.start(answer.status, [*passed_headers(answer), *self._own_headers()], length_bytes)

    def more(self, data: bytes) -> bool:
        """Sends a piece of the body. False if the client does not keep up: then wait until it is `drained`."""
        self.trace.passed(data)
        return self._exchange.write(data)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were sent and that the client has not taken."""
        return self._exchange.unsent_bytes

    async def drained(self) -> None:
        await self._exchange.drained()

    def end(self, data: bytes = b"") -> None:
        """Ends the answer with this last piece of its body."""
        self.trace.passed(data)
        self._exchange.end(data)

    def refuse(self, error: ApiError) -> None:
        """Answers with an error in the shape of the path's API.

        An answer that has begun and cannot go on must not look complete. A stream ends with an error event. Any other
        answer is left without an end, so its connection is cut.
        """
        self.code, self.over_budget = error.code, error.over_budget
        if self._exchange.is_answered:
            return
        if self._exchange.has_started:
            if not self._has_events:
                return
            number = next_sequence_number(self.numbered_events)
            self.end(error_event(error, self._api, self.request_id, number))
            return
        self.status = error.status
        headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        headers += [(b"content-type", b"application/json"), *self._own_headers()]
        self._exchange.whole(error.status, headers, error_body(error, self._api, self.request_id))

    def _own_headers(self) -> RawHeaders:
        request_id = self.request_id.encode()
        own = [(b"x-request-id", request_id), *self.receipt]
        return [(b"request-id", request_id), *own] if self._api == "anthropic" else own


def _as_error(status: int, body: bytes) -> ApiError:
    """A replica's answer that is no stream of events, for a stream that comments have begun."""
    try:
        error = orjson.loads(body)["error"]
        return ApiError(status, str(error.get("code") or "replica_error"), str(error["message"]), error.get("param"))
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        return ApiError(502, "replica_error", f"The replica answered {status}, and no stream of events.")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's x-request-id if it is short and printable, else a new one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"{random.getrandbits(128):032x}"


def passed_headers(answer: Answer) -> RawHeaders:
    """The headers of a replica's answer that the client gets."""
    return [header for header in answer.headers if _is_passed(header[0])]


@lru_cache(maxsize=1024)
def _is_passed(name: bytes) -> bool:
    """Replicas have the same few headers in all of their answers."""
    return name not in _NOT_PASSED and not name.startswith(_NOT_PASSED_BEGINNINGS)
