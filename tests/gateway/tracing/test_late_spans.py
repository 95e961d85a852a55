"""What a span says of how an answer ended; and a trace that fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from structlog.testing import capture_logs

from gateway.tracing.late_spans import LateSpan, LateSpans
from gateway.tracing.request_trace import RequestTrace

RECORD = {"model": "m", "method": "POST", "path": "/v1/x", "status": 200}


def ended(kind: str, record: dict[str, Any], passed: bytes = b"") -> RequestTrace:
    traces = list[RequestTrace]()
    trace = RequestTrace(traces.append, None)
    trace.placing()
    trace.passed(passed)
    trace.end(kind, record)
    assert traces == [trace]
    return trace


def exported(traces: Iterable[RequestTrace]) -> Sequence[ReadableSpan]:
    spans = InMemorySpanExporter()
    LateSpans(spans, Resource({}), InstrumentationScope("test")).export([LateSpan(trace) for trace in traces])
    return spans.get_finished_spans()


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
    _, root = exported([ended(kind, RECORD, end)])
    assert (root.attributes or {}).get("gen_ai.response.finish_reasons") == reasons


def test_a_trace_that_fails_is_left_out_and_others_are_sent() -> None:
    with capture_logs() as told:
        place, root = exported([ended("chat", {}), ended("chat", RECORD)])  # the first record has no fields
    assert [(line["event"], line["reason"]) for line in told] == [("trace lost", "KeyError")]
    assert (place.name, root.name) == ("place", "chat m")
