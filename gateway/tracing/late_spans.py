"""Makes the spans of requests when they are sent. They have no text of prompts and answers.

Names of attributes are those of OpenTelemetry's conventions for generative AI and for HTTP
(https://opentelemetry.io/docs/specs/semconv/gen-ai/); KVGate's own begin with `kvgate.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from gateway.tracing.request_trace import RequestTrace, Step

OPERATIONS = {
    "chat": "chat",
    "response": "chat",
    "message": "chat",
    "completion": "text_completion",
    "embedding": "embeddings",
}
"""By the kind of a request's prompt."""
_NO_RESOURCE = Resource.get_empty()
_FAILED, _UNSET = Status(StatusCode.ERROR), Status()
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


class OneResource(Resource):
    """Who has made all spans of this process. The exporter hashes it for each span; the SDK's writes JSON to do so."""

    def __hash__(self) -> int:
        return id(self)


class LateSpan(ReadableSpan):
    """Stands for all spans of a request until they are made: a batch processor waits with it in its queue."""

    def __init__(self, trace: RequestTrace) -> None:
        context = SpanContext(trace.trace_id, trace.whole.span_id, is_remote=False, trace_flags=TraceFlags(trace.flags))
        super().__init__("", context, resource=_NO_RESOURCE)
        self.trace = trace


class LateSpans(SpanExporter):
    """Makes the spans of each trace, and gives them to another exporter. A trace that fails is left out."""

    def __init__(self, exporter: SpanExporter, resource: Resource, scope: InstrumentationScope) -> None:
        """`resource` is who has made the spans, `scope` its code."""
        self._exporter = exporter
        self._resource = resource
        self._scope = scope

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send all spans of these requests."""
        made = list[ReadableSpan]()
        for span in spans:
            assert isinstance(span, LateSpan)
            try:
                made += list(self._spans_of(span.trace))  # all of them, or none
            except Exception as error:
                _log.warning("trace lost", reason=type(error).__name__)
        return self._exporter.export(made) if made else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Send nothing more."""
        self._exporter.shutdown()

    def _spans_of(self, trace: RequestTrace) -> Iterator[ReadableSpan]:
        state = TraceState.from_header([trace.parent.state]) if trace.parent else TraceState()
        for step in trace.steps:
            if step.reason:
                step.told["error.type"] = step.reason
            kind = SpanKind.CLIENT if step.is_call else SpanKind.INTERNAL
            yield self._span(trace, state, step, step.name, kind, step.told, is_failed=step.reason != "")
        record, whole = trace.record, trace.whole
        is_failed = record["status"] >= 500 or record.get("code") == "stream_broken"
        yield self._span(trace, state, whole, _name(trace), SpanKind.SERVER, _attributes(trace), is_failed=is_failed)

    def _span(
        self,
        trace: RequestTrace,
        state: TraceState,
        step: Step,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, Any],
        *,
        is_failed: bool,
    ) -> ReadableSpan:
        def context(span_id: int, *, is_remote: bool = False) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, is_remote, TraceFlags(trace.flags), state)

        is_remote = trace.parent is not None and step is trace.whole
        return ReadableSpan(
            name,
            context(step.span_id),
            context(step.parent_id, is_remote=is_remote) if step.parent_id else None,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=_FAILED if is_failed else _UNSET,
            start_time=step.began_ns,
            end_time=step.ended_ns,
            instrumentation_scope=self._scope,
        )


def _name(trace: RequestTrace) -> str:
    operation, record = OPERATIONS.get(trace.kind or ""), trace.record
    if operation and record["model"]:
        return f"{operation} {record['model']}"
    return f"{record['method']} {record['path']}"


def _attributes(trace: RequestTrace) -> dict[str, Any]:
    """Those of the whole request."""
    record = trace.record
    told = {name: record[field] for field, name in _ATTRIBUTES.items() if record.get(field) is not None}
    if record.get("costs"):
        told["kvgate.candidates"] = orjson.dumps(record["costs"]).decode()
    if operation := OPERATIONS.get(trace.kind or ""):
        told |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "vllm"}
    field = b"stop_reason" if trace.kind == "message" else b"finish_reason"
    found = [reason.decode() for name, reason in _FINISHED.findall(trace.tail) if name == field]
    if reasons := [reason for reason in found if reason in _REASONS]:
        told["gen_ai.response.finish_reasons"] = reasons
    if record.get("code"):
        told["error.type"] = record["code"]
    return told
