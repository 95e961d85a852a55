"""Decides which requests are traced."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway import __version__
from gateway.metrics.fast_counters import FastCounter
from gateway.settings.tracing_settings import TracingSettings
from gateway.tracing.otel_variables import NO_VARIABLES, OtelVariables
from gateway.tracing.request_trace import Parent, RequestTrace
from gateway.tracing.untraced import UNTRACED, NotSampled, Untraced

if TYPE_CHECKING:
    from gateway.tracing.otlp_sender import OtlpSender

_MOST_STATE_CHARS = 512
# Version ff and ids of zeros are invalid. A later version than 00 may have more fields: https://www.w3.org/TR/trace-context/
_TRACEPARENT = re.compile(
    r"(?!ff)(?!00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_STATE_MEMBER = re.compile(r"[ \t]*(?:[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--~]{0,256})?[ \t]*")


class Tracing:
    """One gateway's traces. Without an endpoint there are none, and nothing is imported."""

    def __init__(
        self, settings: TracingSettings, variables: OtelVariables, gateway: str, sent: FastCounter, lost: FastCounter
    ) -> None:
        """`sent` counts traces that the backend took, and `lost` those that nobody gets. Raises BadVariable."""
        self._ratio = settings.sample_ratio
        self.sender: OtlpSender[RequestTrace] | None = None
        if settings.endpoint is not None and not variables.is_disabled:
            from gateway.tracing.otlp_sender import OtlpSender
            from gateway.tracing.span_writer import SpanWriter

            told = {"service.name": "kvgate", "service.instance.id": gateway, "service.version": __version__}
            writer = SpanWriter({**told, **variables.resource}, __version__)  # the environment's names win
            self.sender = OtlpSender(settings.endpoint, variables, writer.message, sent, lost)
        # One name for all that are left out: nobody stores them.
        self._not_sampled = NotSampled(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00")

    def begin(self, headers: Mapping[str, str]) -> Untraced:
        """The trace of a request with these headers. Whoever sends a traceparent has decided whether it is sampled."""
        if self.sender is None:
            return UNTRACED
        told = headers.get("traceparent")
        given = _TRACEPARENT.fullmatch(told) if told else None
        if given is None:
            return RequestTrace(self.sender.put, None) if random.random() < self._ratio else self._not_sampled
        trace_id, span_id, flags = (int(part, 16) for part in given.groups())
        if not flags & 1:
            return UNTRACED
        return RequestTrace(self.sender.put, Parent(trace_id, span_id, flags, _state(headers.get("tracestate", ""))))


def _state(text: str) -> str:
    """A client's tracestate, unless it is too long or garbage."""
    is_good = len(text) <= _MOST_STATE_CHARS and all(map(_STATE_MEMBER.fullmatch, text.split(",")))
    return text if is_good else ""


def variables_for(settings: TracingSettings, env: Mapping[str, str]) -> OtelVariables:
    """What this environment says of traces, if they are wanted. Raises BadVariable."""
    if settings.endpoint is None:
        return NO_VARIABLES
    variables = OtelVariables.of(env)
    if settings.endpoint.lower().startswith("https:"):
        variables.tls_context()
    return variables
