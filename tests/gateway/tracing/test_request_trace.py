"""What a span says of how an answer ended; and a trace that fails."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from gateway.tracing.request_trace import RequestTrace

RECORD = {"model": "m", "method": "POST", "path": "/v1/x", "status": 200}


@pytest.mark.parametrize(
    ("kind", "end", "reasons"),
    [
        ("chat", b'{"finish_reason":"stop","stop_reason":"kin"}', ("stop",)),  # vLLM's: a text that the client chose
        ("chat", b'{"finish_reason":"kin"}', None),
        ("chat", b'{"finish_reason":null}', None),
        ("message", b'{"stop_reason": "end_turn"}', ("end_turn",)),
    ],
)
def test_why_an_answer_ended_is_told_and_no_text_of_it(kind: str, end: bytes, reasons: tuple[str, ...] | None) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace = RequestTrace(provider.get_tracer("test"), {})
    trace.passed(end)
    trace.end(kind, RECORD)
    (root,) = spans.get_finished_spans()
    assert (root.attributes or {}).get("gen_ai.response.finish_reasons") == reasons


def test_a_trace_that_fails_is_given_up_and_its_request_is_not() -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace = RequestTrace(provider.get_tracer("test"), {})
    with capture_logs() as told:
        trace.end("chat", {})  # this record has no fields
        trace.placing()
        trace.end("chat", RECORD)
    assert [(line["event"], line["step"], line["reason"]) for line in told] == [("trace lost", "end", "KeyError")]
    assert not spans.get_finished_spans()
