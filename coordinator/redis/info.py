"""Redis' answer to INFO, and which settings do not suit KVGate."""

from __future__ import annotations

from collections.abc import Mapping

OLDEST = (6, 2)
"""The oldest version that has every command the scripts use."""
ALLOWS_OOM = (7, 0)
"""Since this version, scripts with the flag allow-oom run when memory is full."""


def read_fields(reply: bytes) -> dict[str, str]:
    """The lines `name:value`, by name, without the headings between them."""
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def version_of(fields: Mapping[str, str]) -> tuple[int, int]:
    """Raises ValueError if they are no numbers."""
    major, minor = (fields.get("redis_version", "7.0") + ".0").split(".")[:2]
    return int(major), int(minor)


def policy_of(fields: Mapping[str, str]) -> str:
    """The policy that says which keys are evicted when memory is full."""
    return fields.get("maxmemory_policy", "noeviction")


def refuses_when_full(version: tuple[int, int]) -> str:
    """A warning about an old version; empty otherwise."""
    if version >= ALLOWS_OOM:
        return ""
    return f"Redis {version[0]}.{version[1]} refuses coordination writes when its memory is full: use 7 or newer"


def evicts_all(policy: str) -> str:
    """A warning about a policy that also evicts keys without a TTL; empty otherwise."""
    if not policy.startswith("allkeys-"):
        return ""
    return f"maxmemory-policy {policy} may evict ownership and load: set volatile-lru"
