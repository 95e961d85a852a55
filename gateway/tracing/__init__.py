"""Traces of requests for an OpenTelemetry backend. Off unless `tracing.endpoint` is set; needs the extra kvgate[otel].

tracing        which requests are traced, and where their spans go
request_trace  what becomes of one request, and when
late_spans     the spans of that, made when they are sent
untraced       what a request without spans does instead: nothing
"""
