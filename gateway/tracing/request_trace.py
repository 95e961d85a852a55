"""The spans of one request. They are written when they leave (see OtlpSender)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.tracing.untraced import Placed, Untraced

SAMPLED, RANDOM = 1, 2
"""Flags of W3C's traceparent: its spans are sent, and its trace id is random."""
_TAIL_BYTES = 4096


class Parent(NamedTuple):
    """The client's own span: W3C's traceparent and tracestate."""

    trace_id: int
    span_id: int
    flags: int
    state: str


@dataclass(slots=True)
class Span:
    """A part of a request, or all of it. Times are in nanoseconds since 1970."""

    name: str
    parent_id: int
    """0: it has none."""
    began_ns: int
    span_id: int = field(default_factory=lambda: random_id(64))
    ended_ns: int = 0
    is_call: bool = False
    """It is what another server does."""
    told: dict[str, Any] = field(default_factory=dict)
    """Its attributes."""
    has_failed: bool = False


class RequestTrace(Untraced):
    """A request whose spans are sent: the whole, its placement, each attempt, the wait for the first byte, and the
    relay of the answer."""

    is_traced = True

    def __init__(self, send: Callable[[RequestTrace], None], parent: Parent | None) -> None:
        """`send` gets the trace when the request is over."""
        self._send = send
        self.parent = parent
        self.trace_id = parent.trace_id if parent else random_id(128)
        self.flags = SAMPLED | (parent.flags & RANDOM if parent else RANDOM)
        self.whole = Span("", parent.span_id if parent else 0, time.time_ns())
        self.parts: list[Span] = []
        """In the order in which they began."""
        self._open: list[Span] = []
        """The attempt, and what it does; or the placement."""
        self.tail = b""
        """The end of the answer."""
        self.kind: str | None = None
        """That of its prompt."""
        self.record: Mapping[str, Any] = {}
        """What became of the request: see relay/request_record.py."""

    def placing(self) -> None:
        self._begin("place", self.whole, time.time_ns())

    def attempting(self, place: Placed) -> Mapping[str, str] | None:
        now_ns = time.time_ns()
        if self._open:
            self._open[-1].told["kvgate.decision"] = place.decision
        self._close(now_ns)
        span = self._begin("attempt", self.whole, now_ns)  # the parent of the replica's spans
        span.is_call, span.told = True, {"kvgate.replica": place.replica, "url.full": place.url}
        self._begin("first byte", span, now_ns)
        headers = {"traceparent": f"00-{self.trace_id:032x}-{span.span_id:016x}-{self.flags:02x}"}
        if self.parent and self.parent.state:
            headers["tracestate"] = self.parent.state
        return headers

    def answered(self) -> None:
        now_ns = time.time_ns()
        self._close(now_ns, down_to=1)
        if self._open:
            self._begin("relay", self._open[0], now_ns)

    def passed(self, piece: bytes) -> None:
        self.tail = (self.tail + piece[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    def failed(self, reason: str) -> None:
        if self._open:
            self._open[0].told["error.type"], self._open[0].has_failed = reason, True
        self._close(time.time_ns())

    def end(self, kind: str | None, record: Mapping[str, Any]) -> None:
        self.whole.ended_ns = time.time_ns()
        self._close(self.whole.ended_ns)
        self.kind, self.record = kind, record
        self._send(self)

    def _begin(self, name: str, parent: Span, at_ns: int) -> Span:
        span = Span(name, parent.span_id, at_ns)
        self.parts.append(span)
        self._open.append(span)
        return span

    def _close(self, at_ns: int, down_to: int = 0) -> None:
        while len(self._open) > down_to:
            self._open.pop().ended_ns = at_ns


def random_id(bits: int) -> int:
    """Of a trace or a span."""
    return random.getrandbits(bits) or 1  # 0 is none
