"""The spans of one request: one for the whole, and one each for a placement, an attempt, the wait for its first byte,
and the relay of its answer. They have no text of prompts and answers.

Names of attributes are those of OpenTelemetry's conventions for generative AI and for HTTP
(https://opentelemetry.io/docs/specs/semconv/gen-ai/); KVGate's own begin with `kvgate.`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import structlog
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.tracing.untraced import Placed, Untraced

OPERATIONS = {
    "chat": "chat",
    "response": "chat",
    "message": "chat",
    "completion": "text_completion",
    "embedding": "embeddings",
}
"""By the kind of a request's prompt."""
_TAIL_BYTES = 4096
_W3C = TraceContextTextMapPropagator()
_FINISHED = re.compile(rb'"(finish_reason|stop_reason)": ?"(\w{1,40})"')
# vLLM's `stop_reason` of a choice may be a text that the client has chosen.
_REASONS = frozenset(
    {
        *("stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error"),
        *("end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "pause_turn"),
    }
)
# By field of a request's record (relay/request_record.py).
_ATTRIBUTES = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "method": "http.request.method",
    "path": "http.route",
    "status": "http.response.status_code",
    "request_id": "kvgate.request_id",
    "gateway": "kvgate.gateway",
    "tenant": "kvgate.tenant",
    "attempts": "kvgate.attempts",
    "replica": "kvgate.replica",
    "policy": "kvgate.policy",
    "why": "kvgate.why",
    "state": "kvgate.state",
    "matched_tokens": "kvgate.matched_tokens",
    "waited_ms": "kvgate.waited_ms",
}


_log = structlog.get_logger("kvgate.tracing")
_Arguments = ParamSpec("_Arguments")


def _harmless(
    step: Callable[Concatenate[RequestTrace, _Arguments], None],
) -> Callable[Concatenate[RequestTrace, _Arguments], None]:
    """A step that ends the trace if it fails, and not the request."""

    @wraps(step)
    def tried(trace: RequestTrace, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> None:
        if trace.is_lost:
            return
        try:
            step(trace, *arguments, **named)
        except Exception as error:
            trace.is_lost = True
            _log.warning("trace lost", step=step.__name__, reason=type(error).__name__)

    return tried


class RequestTrace(Untraced):
    """A request whose spans are sent."""

    is_traced = True

    def __init__(self, tracer: Tracer, headers: Mapping[str, str]) -> None:
        """Of a request with these headers."""
        self._tracer = tracer
        self.is_lost = False
        self._root = tracer.start_span("request", _W3C.extract(headers), SpanKind.SERVER)
        self._open: list[Span] = []
        """The attempt, and what it does now; or the placement."""
        self._tail = b""

    def _begin(
        self, name: str, parent: Span, kind: SpanKind = SpanKind.INTERNAL, attributes: dict[str, str] | None = None
    ) -> None:
        self._open.append(self._tracer.start_span(name, set_span_in_context(parent), kind, attributes=attributes))

    def _close(self, down_to: int = 0) -> None:
        while len(self._open) > down_to:
            self._open.pop().end()

    @_harmless
    def placing(self) -> None:
        self._begin("place", self._root)

    @_harmless
    def attempting(self, place: Placed, headers: dict[str, str]) -> None:
        if self._open:
            self._open[-1].set_attribute("kvgate.decision", place.decision)
        self._close()
        told = {"kvgate.replica": place.replica, "url.full": place.url}
        self._begin("attempt", self._root, SpanKind.CLIENT, told)
        self._begin("first byte", self._open[0])
        _W3C.inject(headers, set_span_in_context(self._open[0]))

    @_harmless
    def answered(self) -> None:
        self._close(down_to=1)
        if self._open:
            self._begin("relay", self._open[0])

    @_harmless
    def passed(self, piece: bytes) -> None:
        self._tail = (self._tail + piece[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    @_harmless
    def failed(self, reason: str) -> None:
        if self._open:
            self._open[0].set_attribute("error.type", reason)
            self._open[0].set_status(StatusCode.ERROR)
        self._close()

    @_harmless
    def end(self, kind: str | None, record: Mapping[str, Any]) -> None:
        self._close()
        operation = OPERATIONS.get(kind or "", "")
        names = (operation, record["model"]) if operation and record["model"] else (record["method"], record["path"])
        self._root.update_name(" ".join(names))
        known = {name: record[field] for field, name in _ATTRIBUTES.items() if record.get(field) is not None}
        self._root.set_attributes(known | _costs(record.get("costs") or []))
        if operation:
            self._root.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": "vllm"})
        field = b"stop_reason" if kind == "message" else b"finish_reason"
        found = [reason.decode() for name, reason in _FINISHED.findall(self._tail) if name == field]
        if reasons := [reason for reason in found if reason in _REASONS]:
            self._root.set_attribute("gen_ai.response.finish_reasons", reasons)
        if record.get("code"):
            self._root.set_attribute("error.type", record["code"])
        if record["status"] >= 500 or record.get("code") == "stream_broken":
            self._root.set_status(StatusCode.ERROR)
        self._root.end()


def _costs(candidates: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The replicas that were looked at, and what each would have cost, in tokens: a list for each term."""
    names = candidates[0] if candidates else ()
    return {f"kvgate.candidates.{name}": [each.get(name, 0) for each in candidates] for name in names}
