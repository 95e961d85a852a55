"""The interface of a source of replicas, and the id of a replica at an address."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from ipaddress import ip_address
from typing import Protocol

from gateway.settings.base import short_id
from gateway.settings.gateway_settings import ReplicaSettings


class SourceDown(Exception):
    """The replicas are unknown. (That does not mean that there are none.)"""


class Source(Protocol):
    """Something that knows the replicas."""

    @property
    def name(self) -> str:
        """Its name in logs, in /ready and in metrics."""
        ...

    @property
    def retry_s(self) -> float:
        """The wait before it is followed again."""
        ...

    def follow(self) -> AsyncGenerator[list[ReplicaSettings], None]:
        """Yields all replicas, at once and whenever they may have changed. It may end, and is then followed again.
        Raises SourceDown."""
        ...


def replica_at(
    scheme: str, address: str, port: int, labels: dict[str, str], name: str | None = None
) -> ReplicaSettings:
    """The replica at an address. Its id is the same on every gateway: `name` if it has one, else its address and port.
    Raises ValueError."""
    ip = ip_address(address)
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    replica = name or f"{ip}-{port}".replace(":", "-")
    return ReplicaSettings(id=short_id(replica), url=f"{scheme}://{host}:{port}", labels=labels)
