"""How a client learns of its tenant's limits: the headers of OpenAI's API, and the refusal. Pure.

Names and forms are those of https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers: times are like
`120ms`, `1.5s` and `1m3s`.
"""

from __future__ import annotations

import math

from coordinator.errors import OverLimit
from coordinator.placement import TenantLimits
from gateway.errors import ApiError


def limit_headers(limits: TenantLimits, left: tuple[int, ...]) -> dict[str, str]:
    """What is left of a tenant's limits. `left` is as in Placement."""
    headers = {}
    requests, requests_ms, tokens, tokens_ms = left[:4]
    for name, limit, remaining, reset_ms in (
        ("requests", limits.requests_per_min, requests, requests_ms),
        ("tokens", limits.tokens_per_min, tokens, tokens_ms),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
            headers[f"x-ratelimit-reset-{name}"] = duration(reset_ms)
    return headers


def duration(ms: int) -> str:
    """A time as OpenAI writes it."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest_ms / 1000:g}s"


def rate_limited(error: OverLimit, limits: TenantLimits) -> ApiError:
    """The answer to a request whose tenant has used up a limit."""
    limit = limits.requests_per_min if error.limit == "requests" else limits.tokens_per_min
    message = f"Rate limit reached: {limit} {error.limit} per minute. Retry in {duration(round(error.wait_s * 1000))}."
    headers = {
        "retry-after": str(max(1, math.ceil(error.wait_s))),
        "retry-after-ms": str(round(error.wait_s * 1000)),
        **limit_headers(limits, error.left),
    }
    return ApiError(429, "rate_limited", message, headers=headers)
