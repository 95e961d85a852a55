"""Traces of requests for an OpenTelemetry backend. Off unless `tracing.endpoint` is set.

tracing         which requests are traced
request_trace   the spans of one request
untraced        what a request without spans does instead: nothing
span_writer     these as a message of OTLP
protobuf        the format of that
otlp_sender     the queue of traces
backend         the way to the backend
otel_variables  what OpenTelemetry's variables say of all this
"""
