"""The spans of a request: the whole, its placement, each attempt, the wait for the first byte, and the relay of the
answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.tracing.request_trace import Answered, Attempting, Failed, Placing, RequestTrace, random_id


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


def spans_of(trace: RequestTrace, name: str, told: dict[str, Any], has_failed: bool) -> list[Span]:
    """The parts in the order in which they began, and then the whole, which has this name and these attributes."""
    whole = Span(name, random_id(64), trace.parent.span_id if trace.parent else 0, trace.began_ns, trace.ended_ns)
    whole.told, whole.has_failed = told, has_failed
    parts = _Parts(whole)
    for moment in trace.moments:
        match moment:
            case Placing():
                parts.begin("place", whole, moment.at_ns)
            case Attempting():
                parts.attempt(moment)
            case Answered():
                parts.first_byte(moment.at_ns)
            case Failed():
                parts.fail(moment)
    parts.close(trace.ended_ns)
    return [*parts.all, whole]


class _Parts:
    """Those of a request until a moment."""

    def __init__(self, whole: Span) -> None:
        self._whole = whole
        self.all: list[Span] = []
        self._open: list[Span] = []
        """The attempt, and what it does; or the placement."""

    def begin(self, name: str, parent: Span, at_ns: int, span_id: int = 0) -> Span:
        span = Span(name, span_id or random_id(64), parent.span_id, at_ns)
        self.all.append(span)
        self._open.append(span)
        return span

    def close(self, at_ns: int, down_to: int = 0) -> None:
        while len(self._open) > down_to:
            self._open.pop().ended_ns = at_ns

    def attempt(self, moment: Attempting) -> None:
        if self._open:
            self._open[-1].told["kvgate.decision"] = moment.decision
        self.close(moment.at_ns)
        span = self.begin("attempt", self._whole, moment.at_ns, moment.span_id)
        span.is_call, span.told = True, {"kvgate.replica": moment.replica, "url.full": moment.url}
        self.begin("first byte", span, moment.at_ns)

    def first_byte(self, at_ns: int) -> None:
        self.close(at_ns, down_to=1)
        if self._open:
            self.begin("relay", self._open[0], at_ns)

    def fail(self, moment: Failed) -> None:
        if self._open:
            self._open[0].told["error.type"], self._open[0].has_failed = moment.reason, True
        self.close(moment.at_ns)
