"""What an answer tells of limits."""

from __future__ import annotations

from coordinator.accounts import AccountLimits, Left, Limits
from coordinator.errors import OverLimit
from gateway.routing.rate_limits import limit_headers, rate_limited

TENANT = AccountLimits("team", requests_per_min=60, tokens_per_min=1000)
KEY = AccountLimits("key:k", requests_per_min=10)
PREFIX = "x-ratelimit-"


def test_requests_and_tokens_each_are_those_of_the_account_that_has_least_left() -> None:
    headers = limit_headers(Limits((TENANT, KEY)), (Left(40, 20_000, 7, 59_000), Left(9, 6000, -1, 0)))
    assert {name.removeprefix(PREFIX): value for name, value in headers.items()} == {
        "limit-requests": "10",
        "remaining-requests": "9",
        "reset-requests": "6s",
        "limit-tokens": "1000",
        "remaining-tokens": "7",
        "reset-tokens": "59s",
    }


def test_if_both_have_as_much_left_the_tenants_figures_are_shown() -> None:
    headers = limit_headers(Limits((TENANT, KEY)), (Left(9, 51_000, 7, 59_000), Left(9, 6000, -1, 0)))
    assert headers["x-ratelimit-limit-requests"] == "60"


def test_a_refusal_names_the_account_and_its_limit() -> None:
    left = Left(0, 60_000, 7, 59_000), Left(0, 60_000, -1, 0)
    messages = [rate_limited(OverLimit("requests", 6, left, at), Limits((TENANT, KEY))).message for at in (0, 1)]
    assert messages == [
        "Rate limit of your tenant reached: 60 requests per minute. Retry in 6s.",
        "Rate limit of your API key reached: 10 requests per minute. Retry in 6s.",
    ]
