"""A receiver of OTLP, for the spans that gateways and engines send."""

from __future__ import annotations

import gzip
import ssl
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.threaded_server import SilentHandler

Span = dict[str, Any]


class Receiver(ThreadingHTTPServer):
    """Takes what exporters send."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Span] = []
        self.keys: list[str | None] = []
        """The header `authorization` of each batch."""
        self.status = 200
        """With another one, it takes nothing."""
        self.refused = 0

    @property
    def url(self) -> str:
        scheme = "https" if isinstance(self.socket, ssl.SSLSocket) else "http"
        return f"{scheme}://127.0.0.1:{self.server_port}/v1/traces"

    def of(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span["trace"] == trace]


class Handler(SilentHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        self.server.keys.append(self.headers["authorization"])
        if self.server.status == 200:
            self.server.spans += spans_of(ExportTraceServiceRequest.FromString(body))
        else:
            self.server.refused += 1
        self.send_response(self.server.status)
        self.end_headers()


def spans_of(sent: ExportTraceServiceRequest) -> Iterator[Span]:
    for of_resource in sent.resource_spans:
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield {
                    "trace": span.trace_id.hex(),
                    "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "name": span.name,
                    "took_ns": span.end_time_unix_nano - span.start_time_unix_nano,
                    "resource": attributes(of_resource.resource.attributes),
                    **attributes(span.attributes),
                }


def attributes(found: Any) -> dict[str, Any]:
    return {each.key: value_of(each.value) for each in found}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
