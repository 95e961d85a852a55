"""Where traces go, and how many requests are traced."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from gateway.settings.base import Section


class TracingSettings(Section):
    endpoint: str | None = None
    sample_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.01

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "http://x")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no OTLP receiver's URL, like http://127.0.0.1:4318/v1/traces")
        if parts.query or parts.username or parts.password:  # the exporter logs its URL
            raise ValueError("must have no query, user or password; OTEL_EXPORTER_OTLP_HEADERS takes keys")
        return url
