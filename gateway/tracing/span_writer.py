"""Writes the spans of a request as a message of OTLP. They have no text of prompts and answers.

The numbers of fields are those of https://github.com/open-telemetry/opentelemetry-proto (trace.proto, common.proto).

Names of attributes are those of OpenTelemetry's conventions for generative AI and for HTTP
(https://opentelemetry.io/docs/specs/semconv/gen-ai/); KVGate's own begin with `kvgate.`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import orjson

from gateway.tracing.protobuf import (
    double,
    fixed32,
    fixed64,
    of_fixed32,
    of_fixed64,
    of_sized,
    of_varint,
    sized,
    varint,
)
from gateway.tracing.request_trace import RequestTrace, Span

# Span
_TRACE_STATE, _NAME, _ATTRIBUTE = map(of_sized, (3, 5, 9))
_TRACE_ID, _SPAN_ID, _PARENT = of_sized(1) + varint(16), of_sized(2) + varint(8), of_sized(4) + varint(8)
_INTERNAL, _SERVER, _CLIENT = (of_varint(6) + varint(kind) for kind in (1, 2, 3))
_BEGAN, _ENDED, _FLAGS = of_fixed64(7), of_fixed64(8), of_fixed32(16)
_FAILED = sized(of_sized(15), of_varint(3) + varint(2))
"""Its status: an error."""
_RESOURCE_SPANS, _RESOURCE, _OF_RESOURCE, _SCOPE, _OF_SCOPE, _SPAN = map(of_sized, (1, 1, 1, 1, 2, 2))
_SCOPE_NAME, _SCOPE_VERSION = map(of_sized, (1, 2))
_KEY, _VALUE = map(of_sized, (1, 2))
# AnyValue
_TEXT, _INT, _DOUBLE, _LIST, _LISTED = of_sized(1), of_varint(3), of_fixed64(4), of_sized(5), of_sized(1)

OPERATIONS = {
    "chat": "chat",
    "response": "chat",
    "message": "chat",
    "completion": "text_completion",
    "embedding": "embeddings",
}
"""By the kind of a request's prompt."""
_KNOWS_PARENT, _HAS_REMOTE_PARENT = 0x100, 0x200
"""Flags of a span, beside those of its trace."""
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
    "served_model": "gen_ai.response.model",
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
    "hedged": "kvgate.hedged",
}


class SpanWriter:
    """Writes the spans of one gateway."""

    def __init__(self, resource: Mapping[str, str], version: str) -> None:
        """`resource` says who has made the spans, `version` is its code's."""
        scope = sized(_SCOPE_NAME, b"kvgate") + sized(_SCOPE_VERSION, version.encode())
        self._scope = sized(_SCOPE, scope)
        self._resource = sized(_RESOURCE, _written(resource, _OF_RESOURCE))

    def message(self, trace: RequestTrace) -> bytes:
        """An ExportTraceServiceRequest with all spans of a trace. Several of these, joined, are one with the spans of
        all: https://protobuf.dev/programming-guides/encoding/#last-one-wins. Raises KeyError for a record without its
        fields, OverflowError for a number of more than 64 bits, UnicodeEncodeError, and TypeError."""
        record = trace.record
        has_failed = record["status"] >= 500 or record.get("code") == "stream_broken"
        spans = [_span(trace, part, _CLIENT if part.is_call else _INTERNAL, _KNOWS_PARENT) for part in trace.parts]
        remote = _HAS_REMOTE_PARENT if trace.parent else 0
        whole = replace(trace.whole, name=_name(trace), told=_attributes(trace), has_failed=has_failed)
        spans.append(_span(trace, whole, _SERVER, _KNOWS_PARENT | remote))
        of_scope = sized(_OF_SCOPE, self._scope + b"".join(spans))
        return sized(_RESOURCE_SPANS, self._resource + of_scope)


def _span(trace: RequestTrace, span: Span, kind: bytes, flags: int) -> bytes:
    written = [
        *(_TRACE_ID, trace.trace_id.to_bytes(16), _SPAN_ID, span.span_id.to_bytes(8), kind),
        *(
            _BEGAN,
            fixed64(span.began_ns),
            _ENDED,
            fixed64(span.ended_ns),
            _FLAGS,
            fixed32(trace.flags | flags),
        ),
        *(sized(_NAME, span.name.encode()), _written(span.told, _ATTRIBUTE)),
    ]
    if span.parent_id:
        written += (_PARENT, span.parent_id.to_bytes(8))
    if trace.parent and trace.parent.state:
        written.append(sized(_TRACE_STATE, trace.parent.state.encode()))
    if span.has_failed:
        written.append(_FAILED)
    return sized(_SPAN, b"".join(written))


def _written(told: Mapping[str, Any], tag: bytes) -> bytes:
    return b"".join([sized(tag, _key(name) + sized(_VALUE, _value(value))) for name, value in told.items()])


@cache  # names are few, and the same for all requests
def _key(name: str) -> bytes:
    return sized(_KEY, name.encode())


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return sized(_TEXT, value.encode())
    if isinstance(value, int):
        return _INT + varint(value)
    if isinstance(value, float):
        return _DOUBLE + double(value)
    return sized(_LIST, b"".join([sized(_LISTED, _value(each)) for each in value]))


def _name(trace: RequestTrace) -> str:
    operation, record = OPERATIONS.get(trace.kind or ""), trace.record
    if operation and record["model"]:
        return f"{operation} {record['model']}"
    return f"{record['method']} {record['path']}"


def _attributes(trace: RequestTrace) -> dict[str, Any]:
    """Those of the whole request."""
    record = trace.record
    told = {name: value for field, name in _ATTRIBUTES.items() if (value := record.get(field)) is not None}
    if costs := record.get("costs"):
        told["kvgate.candidates"] = orjson.dumps(costs).decode()
    if operation := OPERATIONS.get(trace.kind or ""):
        told |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "vllm"}
    field = b"stop_reason" if trace.kind == "message" else b"finish_reason"
    found = [reason.decode() for name, reason in _FINISHED.findall(trace.tail) if name == field]
    if reasons := [reason for reason in found if reason in _REASONS]:
        told["gen_ai.response.finish_reasons"] = reasons
    if record.get("code"):
        told["error.type"] = record["code"]
    return told
