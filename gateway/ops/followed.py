"""A replica with its agent: what `kvgate agent` and `kvgate up --replica` are told of it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationInfo, field_validator

from gateway.ops.errors import CommandError
from gateway.settings.gateway_settings import GatewaySettings, ReplicaSettings
from gateway.tls import BadCertificate, Certificate, towards_replicas

_DIGITS = 9


class FollowedReplica(ReplicaSettings):
    """A server that runs already. Without `events`, its engine is asked where it publishes and replays them."""

    events: str = ""
    replay: str = ""
    lmcache: str = ""
    """The HTTP server of the LMCache beside it."""

    @field_validator("dp_rank", mode="before")
    @classmethod
    def _is_a_rank(cls, rank: Any) -> Any:
        if isinstance(rank, str):
            if not (rank.isascii() and rank.isdigit() and len(rank) <= _DIGITS):
                raise ValueError("must be the replica's rank in a data-parallel server: 0, 1, …")
            return int(rank)
        return rank

    @field_validator("events", "replay")
    @classmethod
    def _is_an_endpoint(cls, url: str, info: ValidationInfo) -> str:
        if url and not _is_endpoint(url):
            raise ValueError(f"is {url!r}; must be tcp://host:port, or ipc:///path of a socket")
        if url and not info.data.get("events", url):
            raise ValueError("needs events; without either, both are asked of the engine")
        return url

    @field_validator("lmcache")
    @classmethod
    def _is_a_base(cls, url: str) -> str:
        if url and not is_http(url):
            raise ValueError(f"is {url!r}; must be its HTTP server's base, like http://127.0.0.1:8080")
        return url.rstrip("/")


def replica_certificate(settings: GatewaySettings) -> Certificate | None:
    """What replicas want to see of their clients, if they want that."""
    try:
        return towards_replicas(settings.replica_tls)
    except BadCertificate as error:
        raise CommandError(str(error)) from None


def is_http(url: str) -> bool:
    """Whether this is the base URL of an HTTP server."""
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _is_endpoint(url: str) -> bool:
    """Whether ZeroMQ can connect to it."""
    try:
        parts = urlsplit(url)
        is_socket = parts.scheme == "ipc" and not parts.netloc and len(parts.path) > 1
        return is_socket or (parts.scheme == "tcp" and bool(parts.hostname) and parts.port is not None)
    except ValueError:
        return False
