"""Where traces go, and how many requests are traced."""

from __future__ import annotations

import re
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
        if parts.query or parts.username or parts.password:  # libraries put URLs into their errors
            raise ValueError("must have no query, user or password; OTEL_EXPORTER_OTLP_HEADERS takes keys")
        is_good = parts.scheme in ("http", "https") and parts.hostname and not re.search(r"\s", url or "")
        if not is_good or parts.port == 0:  # to ask for the port raises ValueError for one that is none
            raise ValueError(f"{url!r} is no OTLP receiver's URL, like http://127.0.0.1:4318/v1/traces")
        return url
