"""Decides which requests are traced, and sends their spans over OTLP (HTTP, protobuf) from a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gateway.settings.tracing_settings import TracingSettings
from gateway.tracing.request_trace import Parent, RequestTrace
from gateway.tracing.untraced import UNTRACED, NotSampled, Untraced

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

_CLOSES_WITHIN_S = 5.0
_SENDS_WITHIN_S = 5
_MOST_STATE_CHARS = 512
# Version ff and ids of zeros are invalid. A later version than 00 may have more fields: https://www.w3.org/TR/trace-context/
_TRACEPARENT = re.compile(
    r"(?!ff)(?!00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_SIZES = {"OTEL_BSP_MAX_QUEUE_SIZE": "512", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "128"}
"""In requests. To make the spans of a batch takes some milliseconds."""


class MissingExtra(Exception):
    """The libraries are not installed."""


class Tracing:
    """One gateway's traces. Without an endpoint there are none, and nothing is imported."""

    def __init__(self, settings: TracingSettings, gateway: str, version: str) -> None:
        self._ratio = settings.sample_ratio
        self._processor: BatchSpanProcessor | None = None
        if settings.endpoint is not None:
            self._processor = _processor(settings.endpoint, gateway, version)
            self._send = _sender(self._processor)
        # One name for all that are left out: nobody stores them.
        self._not_sampled = NotSampled(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00")

    def __repr__(self) -> str:
        return f"<Tracing {'off' if self._processor is None else f'of {self._ratio:%}'}>"

    def begin(self, headers: Mapping[str, str]) -> Untraced:
        """The trace of a request with these headers. Whoever sends a traceparent has decided whether it is sampled."""
        if self._processor is None:
            return UNTRACED
        given = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        if given is None:
            return RequestTrace(self._send, None) if random.random() < self._ratio else self._not_sampled
        trace_id, span_id, flags = (int(part, 16) for part in given.groups())
        if not flags & 1:
            return UNTRACED
        state = headers.get("tracestate", "")
        parent = Parent(trace_id, span_id, flags, state if len(state) <= _MOST_STATE_CHARS else "")
        return RequestTrace(self._send, parent)

    async def close(self) -> None:
        """Send what is left, for at most _CLOSES_WITHIN_S."""
        if self._processor is None:
            return
        processor, sent, loop = self._processor, asyncio.Event(), asyncio.get_running_loop()

        def send() -> None:
            processor.shutdown()  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):  # the loop is closed: it took too long
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=send, daemon=True).start()  # nobody waits for it at the exit
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSES_WITHIN_S):
                await sent.wait()


def heed_environment(settings: TracingSettings, env: MutableMapping[str, str]) -> TracingSettings:
    """The settings as OpenTelemetry's variables change them. `env` gets those that tell its SDK the sizes of the queue
    and of batches, unless somebody has set one of these."""
    if not env.keys() & _SIZES.keys():
        env.update(_SIZES)
    is_disabled = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return settings.model_copy(update={"endpoint": None}) if is_disabled else settings


def check_extra(settings: TracingSettings) -> None:
    """Raises MissingExtra if traces are wanted, and the libraries for them are not installed."""
    if settings.endpoint is None:
        return
    try:
        is_there = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise MissingExtra("tracing.endpoint: needs more libraries: pip install 'kvgate[otel]'")


def _processor(endpoint: str, gateway: str, version: str) -> BatchSpanProcessor:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from gateway.tracing.late_spans import LateSpans, OneResource

    # It logs headers of clients that it cannot read.
    logging.getLogger("opentelemetry.trace").setLevel(logging.CRITICAL)
    told = {"service.name": "kvgate", "service.instance.id": gateway, "service.version": version}
    exporter = OTLPSpanExporter(endpoint, timeout=_SENDS_WITHIN_S)
    made = Resource.create({**told, **OTELResourceDetector().detect().attributes})  # the environment's names win
    resource = OneResource(made.attributes, made.schema_url)
    spans = LateSpans(exporter, resource, InstrumentationScope("kvgate", version))
    return BatchSpanProcessor(spans)


def _sender(processor: BatchSpanProcessor) -> Callable[[RequestTrace], None]:
    from gateway.tracing.late_spans import LateSpan

    def send(trace: RequestTrace) -> None:
        processor.on_end(LateSpan(trace))

    return send
