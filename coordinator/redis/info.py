"""Redis' answer to INFO, and what of it does not fit what KVGate keeps there."""

from __future__ import annotations

from collections.abc import Mapping

OLDEST = (6, 2)
"""That has all that scripts use."""
ALLOWS_OOM = (7, 0)
"""Since then, scripts that say so are let through when memory is full."""


def read_fields(reply: bytes) -> dict[str, str]:
    """Its lines `name:value`, by name; the headings between them are left out."""
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def version_of(fields: Mapping[str, str]) -> tuple[int, int]:
    """Raises ValueError where a number is none."""
    major, minor = (fields.get("redis_version", "7.0") + ".0").split(".")[:2]
    return int(major), int(minor)


def policy_of(fields: Mapping[str, str]) -> str:
    """What is evicted when memory is full."""
    return fields.get("maxmemory_policy", "noeviction")


def refuses_when_full(version: tuple[int, int]) -> str:
    """What an operator should know of an old one; empty otherwise."""
    if version >= ALLOWS_OOM:
        return ""
    return f"Redis {version[0]}.{version[1]} refuses coordination writes when its memory is full: use 7 or newer"


def evicts_all(policy: str) -> str:
    """What an operator should know of a policy that evicts what has no TTL as well; empty otherwise."""
    if not policy.startswith("allkeys-"):
        return ""
    return f"maxmemory-policy {policy} may evict ownership and load: set volatile-lru"
