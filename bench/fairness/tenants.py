"""The tenants of a run, and the gateways' configuration for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tenant:
    """One tenant, and the size of its requests. Its API key is its name."""

    name: str
    prompt_tokens: int
    """About: a token is four bytes of text. No two prompts have anything in common."""
    output_tokens: int
    """On average. Answers have between half and one and a half times as many, each number as often."""
    weight: int = 1
    priority: str | None = None
    is_on_one_gateway: bool = False
    """Its clients use the first gateway only."""


def config(tenants: Sequence[Tenant], queue: Mapping[str, Any], max_active_requests: int | None) -> dict[str, Any]:
    """The gateways' configuration. They may wait 200 ms for Redis, because it shares the processors with all others
    here."""
    keys = [
        {"name": each.name, "tenant": each.name, "sha256": hashlib.sha256(each.name.encode()).hexdigest()}
        for each in tenants
    ]
    return {
        "redis": {"budget_ms": 200},
        "policy": {"max_active_requests": max_active_requests} if max_active_requests else {},
        "queue": dict(queue),
        "tenants": [_entry(each) for each in tenants],
        "security": {"share_cache": True, "api_keys": keys},
    }


def _entry(tenant: Tenant) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": tenant.name, "weight": tenant.weight}
    if tenant.priority:
        entry["priority"] = tenant.priority
    return entry
