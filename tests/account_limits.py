"""The limits of requests, for tests of those that count them."""

from __future__ import annotations

from coordinator.accounts import AccountLimits, Limits, account_of_tenant


def limits_of(tenant: str = "t", *, output_tokens: int = 0, **limits: int) -> Limits:
    """Of a request that is charged to this tenant only."""
    return Limits((AccountLimits(account_of_tenant(tenant), **limits),), output_tokens)
