"""Notes what becomes of one request, and when. Spans are made of that when they leave (see OtlpSender)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
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


class Placing(NamedTuple):
    """A place is looked for. Times are in nanoseconds since 1970."""

    at_ns: int


class Attempting(NamedTuple):
    """It was placed, and is sent there."""

    at_ns: int
    span_id: int
    """The parent of the replica's spans."""
    replica: str
    url: str
    decision: str


class Answered(NamedTuple):
    """The first byte of an answer has come."""

    at_ns: int


class Failed(NamedTuple):
    """An attempt is over, without an answer."""

    at_ns: int
    reason: str


class RequestTrace(Untraced):
    """A request whose spans are sent."""

    is_traced = True

    def __init__(self, send: Callable[[RequestTrace], None], parent: Parent | None) -> None:
        """`send` gets the trace when the request is over."""
        self._send = send
        self.parent = parent
        self.trace_id = parent.trace_id if parent else random_id(128)
        self.flags = SAMPLED | (parent.flags & RANDOM if parent else RANDOM)
        self.moments: list[Placing | Attempting | Answered | Failed] = []
        """In the order in which they came."""
        self.began_ns, self.ended_ns = time.time_ns(), 0
        self.tail = b""
        """The end of the answer."""
        self.kind: str | None = None
        """That of its prompt."""
        self.record: Mapping[str, Any] = {}
        """What became of the request: see relay/request_record.py."""

    def placing(self) -> None:
        self.moments.append(Placing(time.time_ns()))

    def attempting(self, place: Placed, headers: dict[str, str]) -> None:
        span_id = random_id(64)
        self.moments.append(Attempting(time.time_ns(), span_id, place.replica, place.url, place.decision))
        headers["traceparent"] = f"00-{self.trace_id:032x}-{span_id:016x}-{self.flags:02x}"
        if self.parent and self.parent.state:
            headers["tracestate"] = self.parent.state
        else:  # a client's state without its trace says nothing
            headers.pop("tracestate", None)

    def answered(self) -> None:
        self.moments.append(Answered(time.time_ns()))

    def passed(self, piece: bytes) -> None:
        self.tail = (self.tail + piece[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    def failed(self, reason: str) -> None:
        self.moments.append(Failed(time.time_ns(), reason))

    def end(self, kind: str | None, record: Mapping[str, Any]) -> None:
        self.ended_ns = time.time_ns()
        self.kind, self.record = kind, record
        self._send(self)


def random_id(bits: int) -> int:
    """Of a trace or a span."""
    return random.getrandbits(bits) or 1  # 0 is none
