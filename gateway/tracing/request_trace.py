"""Notes what becomes of one request, and when: the whole, its placement, each attempt, the wait for the first byte, and
the relay of the answer. The spans of these are written when the request is over (span_writer.py).
"""

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


class Step:
    """A part of a request, or all of it, from its making until its end. Times are in nanoseconds since 1970."""

    __slots__ = ("began_ns", "ended_ns", "is_call", "name", "parent_id", "reason", "span_id", "told")

    def __init__(self, name: str, parent_id: int, is_call: bool = False) -> None:
        """`is_call`: it is what another server does."""
        self.name = name
        self.span_id = _random_id(64)
        self.parent_id = parent_id
        self.is_call = is_call
        self.told: dict[str, Any] = {}
        """Its attributes."""
        self.reason = ""
        """Why it failed; empty if it did not."""
        self.began_ns = time.time_ns()
        self.ended_ns = 0

    def __repr__(self) -> str:
        return f"<Step {self.name}>"

    def end(self) -> None:
        """It is over."""
        self.ended_ns = time.time_ns()


class RequestTrace(Untraced):
    """A request whose spans are sent."""

    is_traced = True

    def __init__(self, send: Callable[[RequestTrace], None], parent: Parent | None) -> None:
        """`send` gets the trace when the request is over."""
        self._send = send
        self.parent = parent
        self.trace_id = parent.trace_id if parent else _random_id(128)
        self.flags = SAMPLED | (parent.flags & RANDOM if parent else RANDOM)
        self.whole = Step("", parent.span_id if parent else 0)
        self.steps: list[Step] = []
        """Those of the whole, in the order in which they began."""
        self._open: list[Step] = []
        """The attempt, and what it does now; or the placement."""
        self.tail = b""
        """The end of the answer."""
        self.kind: str | None = None
        """That of its prompt."""
        self.record: Mapping[str, Any] = {}
        """What became of the request: see relay/request_record.py."""

    def _begin(self, name: str, parent: Step, is_call: bool = False) -> Step:
        step = Step(name, parent.span_id, is_call)
        self.steps.append(step)
        self._open.append(step)
        return step

    def _close(self, down_to: int = 0) -> None:
        while len(self._open) > down_to:
            self._open.pop().end()

    def placing(self) -> None:
        self._begin("place", self.whole)

    def attempting(self, place: Placed, headers: dict[str, str]) -> None:
        if self._open:
            self._open[-1].told["kvgate.decision"] = place.decision
        self._close()
        attempt = self._begin("attempt", self.whole, is_call=True)
        attempt.told = {"kvgate.replica": place.replica, "url.full": place.url}
        self._begin("first byte", attempt)
        headers["traceparent"] = f"00-{self.trace_id:032x}-{attempt.span_id:016x}-{self.flags:02x}"
        if self.parent and self.parent.state:
            headers["tracestate"] = self.parent.state
        else:  # a client's state without its trace says nothing
            headers.pop("tracestate", None)

    def answered(self) -> None:
        self._close(down_to=1)
        if self._open:
            self._begin("relay", self._open[0])

    def passed(self, piece: bytes) -> None:
        self.tail = (self.tail + piece[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    def failed(self, reason: str) -> None:
        if self._open:
            self._open[0].reason = reason
        self._close()

    def end(self, kind: str | None, record: Mapping[str, Any]) -> None:
        self._close()
        self.whole.end()
        self.kind, self.record = kind, record
        self._send(self)


def _random_id(bits: int) -> int:
    return random.getrandbits(bits) or 1  # 0 is none
