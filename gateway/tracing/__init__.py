"""Traces of requests for an OpenTelemetry backend. Off unless `tracing.endpoint` is set; needs the extra kvgate[otel].

tracing        which requests are traced, and where their spans go
request_trace  the spans of one request
untraced       what a request without spans does instead: nothing
"""
