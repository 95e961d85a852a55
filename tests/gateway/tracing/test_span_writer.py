"""What is written for a span, read by OpenTelemetry's own library."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.tracing.request_trace import RequestTrace
from gateway.tracing.span_writer import SpanWriter
from tests import otlp
from tests.otlp import spans_of

RECORD = {"model": "m", "method": "POST", "path": "/v1/x", "status": 200}


def ended(kind: str, record: dict[str, Any], passed: bytes = b"") -> RequestTrace:
    traces = list[RequestTrace]()
    trace = RequestTrace(traces.append, None)
    trace.placing()
    trace.passed(passed)
    trace.end(kind, record)
    assert traces == [trace]
    return trace


def written(*traces: RequestTrace) -> list[otlp.Span]:
    writer = SpanWriter({}, "test")
    messages = [writer.message(trace) for trace in traces]
    return list(spans_of(ExportTraceServiceRequest.FromString(b"".join(messages))))


@pytest.mark.parametrize(
    ("kind", "end", "reasons"),
    [
        ("chat", b'{"finish_reason":"stop","stop_reason":"kin"}', ["stop"]),  # vLLM's: a text that the client chose
        ("chat", b'{"finish_reason":"kin"}', None),
        ("chat", b'{"finish_reason":null}', None),
        ("message", b'{"stop_reason": "end_turn"}', ["end_turn"]),
    ],
)
def test_why_an_answer_ended_is_told_and_no_text_of_it(kind: str, end: bytes, reasons: list[str] | None) -> None:
    _, root = written(ended(kind, RECORD, end))
    assert root.get("gen_ai.response.finish_reasons") == reasons


@pytest.mark.parametrize(
    "value", ["", "x" * 127, "é" * 20_000, 0, 127, 128, 2**63 - 1, -1, -(2**63), 0.0, -1.5, ["a", "b" * 200], []]
)
def test_a_value_is_read_as_it_was(value: Any) -> None:
    _, root = written(ended("chat", {**RECORD, "request_id": "before", "tenant": value, "attempts": 1}))
    told = [root[f"kvgate.{name}"] for name in ("request_id", "tenant", "attempts")]
    assert told == ["before", value, 1]


def test_of_many_requests_each_tells_its_own() -> None:
    tenants = [f"tenant {number % 7}" for number in range(1500)]
    traces = [ended("chat", {**RECORD, "request_id": f"{at}", "tenant": each}) for at, each in enumerate(tenants)]
    roots = [span for span in written(*traces) if span["name"] == "chat m"]
    assert [root["kvgate.request_id"] for root in roots] == [f"{at}" for at in range(len(traces))]
    assert [root["kvgate.tenant"] for root in roots] == tenants


def test_messages_joined_are_one_message_with_the_spans_of_all() -> None:
    traces = [ended("chat", RECORD), ended("completion", RECORD)]
    assert [span["name"] for span in written(*traces)] == ["place", "chat m", "place", "text_completion m"]
