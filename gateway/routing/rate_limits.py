"""How a client learns of the limits of its tenant and API key: the headers of OpenAI's API, and the refusal. Pure.

Names and forms are those of https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers: times are like
`120ms`, `1.5s` and `1m3s`.
"""

from __future__ import annotations

import math

from coordinator.accounts import Left, Limits, is_account_of_key
from coordinator.errors import OverLimit
from gateway.errors import ApiError


def limit_headers(limits: Limits, left: tuple[Left, ...]) -> dict[str, str]:
    """What is left of a request's limits: of requests and of tokens each, the figures of the account that has least
    left; the tenant's if both have as much. `left` is as in Placement."""
    headers = {}
    pairs = list(zip(limits.accounts, left, strict=True))
    of_requests = [(of.requests_per_min, has.requests, has.requests_ms) for of, has in pairs if of.requests_per_min]
    of_tokens = [(of.tokens_per_min, has.tokens, has.tokens_ms) for of, has in pairs if of.tokens_per_min]
    for name, figures in (("requests", of_requests), ("tokens", of_tokens)):
        if figures:
            limit, remaining, reset_ms = min(figures, key=lambda figure: figure[1])
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


def rate_limited(error: OverLimit, limits: Limits) -> ApiError:
    """The answer to a request of which an account has used up a limit."""
    account = limits.accounts[error.at]
    limit = account.requests_per_min if error.limit == "requests" else account.tokens_per_min
    whose, retry = "API key" if is_account_of_key(account.account) else "tenant", duration(round(error.wait_s * 1000))
    message = f"Rate limit of your {whose} reached: {limit} {error.limit} per minute. Retry in {retry}."
    headers = {
        "retry-after": str(max(1, math.ceil(error.wait_s))),
        "retry-after-ms": str(round(error.wait_s * 1000)),
        **limit_headers(limits, error.left),
    }
    return ApiError(429, "rate_limited", message, headers=headers)
