"""Decides which requests are traced, and sends their spans over OTLP (HTTP, protobuf) from a thread of its own."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gateway.settings.tracing_settings import TracingSettings
from gateway.tracing.untraced import UNTRACED, NotSampled, Untraced

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_FLUSH_MS = 5000


class MissingExtra(Exception):
    """The libraries are not installed."""


class Tracing:
    """One gateway's traces. Without an endpoint there are none, and nothing is imported."""

    def __init__(self, settings: TracingSettings, gateway: str, version: str) -> None:
        self._ratio = settings.sample_ratio
        self._provider: TracerProvider | None = None
        if settings.endpoint is not None:
            from gateway.tracing.request_trace import RequestTrace

            self._provider = _provider(settings.endpoint, gateway, version)
            self._traced = partial(RequestTrace, self._provider.get_tracer("kvgate", version))
        # One name for all that are left out: nobody stores them.
        self._not_sampled = NotSampled(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00")

    def __repr__(self) -> str:
        return f"<Tracing {'off' if self._provider is None else f'of {self._ratio:%}'}>"

    def begin(self, headers: Mapping[str, str]) -> Untraced:
        """The trace of a request with these headers. Whoever sends a traceparent has decided whether it is sampled."""
        if self._provider is None:
            return UNTRACED
        given = headers.get("traceparent", "")
        if not given and random.random() >= self._ratio:
            return self._not_sampled
        if given and not given.endswith(("1", "3")):  # the lowest bit of the flags
            return UNTRACED
        return self._traced(headers)

    async def close(self) -> None:
        """Send what is left, within some seconds."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.force_flush, _FLUSH_MS)
            await asyncio.to_thread(self._provider.shutdown)


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


def _provider(endpoint: str, gateway: str, version: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    told = {"service.name": "kvgate", "service.instance.id": gateway, "service.version": version}
    # What is sampled is decided here, once for each request: the SDK would cost each request some microseconds.
    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(told), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider
