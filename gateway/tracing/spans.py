"""The spans of a request: the whole, its placement, each attempt, the wait for the first byte, and the relay of the
answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.tracing.request_trace import Attempt, RequestTrace, random_id


@dataclass(slots=True)
class Span:
    """A part of a request, or all of it. Times are in nanoseconds since 1970."""

    name: str
    span_id: int
    parent_id: int
    """0: it has none."""
    began_ns: int
    ended_ns: int = 0
    is_call: bool = False
    """It is what another server does."""
    told: dict[str, Any] = field(default_factory=dict)
    """Its attributes."""
    has_failed: bool = False


def spans_of(trace: RequestTrace, name: str, told: Mapping[str, Any], has_failed: bool) -> list[Span]:
    """The parts in the order in which they began, and then the whole, which has this name and these attributes."""
    whole = Span(name, random_id(64), trace.parent.span_id if trace.parent else 0, trace.began_ns, trace.ended_ns)
    whole.told, whole.has_failed = dict(told), has_failed
    parts = _Parts(whole)
    for moment in trace.moments:
        if moment.what == "placing":
            parts.begin("place", whole, moment.at_ns)
        elif moment.what == "answered":
            parts.first_byte(moment.at_ns)
        elif moment.attempt is None:
            parts.fail(moment.reason, moment.at_ns)
        else:
            parts.attempt(moment.attempt, moment.at_ns)
    parts.close(trace.ended_ns)
    return [*parts.all, whole]


class _Parts:
    """Those of a request until a moment."""

    def __init__(self, whole: Span) -> None:
        self._whole = whole
        self.all: list[Span] = []
        self._open: list[Span] = []
        """The attempt, and what it does; or the placement."""

    def begin(self, name: str, parent: Span, at_ns: int) -> Span:
        span = Span(name, random_id(64), parent.span_id, at_ns)
        self.all.append(span)
        self._open.append(span)
        return span

    def close(self, at_ns: int, down_to: int = 0) -> None:
        while len(self._open) > down_to:
            self._open.pop().ended_ns = at_ns

    def attempt(self, attempt: Attempt, at_ns: int) -> None:
        if self._open:
            self._open[-1].told["kvgate.decision"] = attempt.decision
        self.close(at_ns)
        span = self.begin("attempt", self._whole, at_ns)
        span.span_id, span.is_call = attempt.span_id, True
        span.told = {"kvgate.replica": attempt.replica, "url.full": attempt.url}
        self.begin("first byte", span, at_ns)

    def first_byte(self, at_ns: int) -> None:
        self.close(at_ns, down_to=1)
        if self._open:
            self.begin("relay", self._open[0], at_ns)

    def fail(self, reason: str, at_ns: int) -> None:
        if self._open:
            self._open[0].told["error.type"], self._open[0].has_failed = reason, True
        self.close(at_ns)
