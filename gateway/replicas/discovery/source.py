"""What following replicas means, and what an address makes a replica called."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from ipaddress import ip_address
from typing import Protocol

from gateway.settings.base import short_id
from gateway.settings.gateway_settings import ReplicaSettings


class SourceDown(Exception):
    """It cannot be told which replicas there are. Not that there are none."""


class Source(Protocol):
    """Somewhere that tells which replicas there are."""

    @property
    def name(self) -> str:
        """What it is called in logs, in /ready and in metrics."""
        ...

    @property
    def retry_s(self) -> float:
        """How long to wait before it is followed again."""
        ...

    def follow(self) -> AsyncGenerator[list[ReplicaSettings], None]:
        """All replicas there are, at once and whenever that may have changed. It may end, and is then followed anew.
        Raises SourceDown."""
        ...


def replica_at(scheme: str, address: str, port: int, name: str | None = None) -> ReplicaSettings:
    """The replica at an address. Its id is the same on every gateway: `name` if it has one, else its address and port.
    Raises ValueError."""
    ip = ip_address(address)
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    replica = name or f"{ip}-{port}".replace(":", "-")
    return ReplicaSettings(id=short_id(replica), url=f"{scheme}://{host}:{port}")
