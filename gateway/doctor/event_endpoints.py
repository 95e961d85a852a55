"""Which of an engine's endpoints of KV events answer to other hosts than its own."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

from gateway.doctor.evidence import Unknown

_GREETING = b"\xff"
"""The first byte of ZeroMQ's greeting. A proxy that accepts every connection sends nothing."""
_FAR_AWAY = ("192.0.2.1", 9)
"""An address that nobody has. Connecting UDP to it sends nothing, and shows this machine's address on the way there."""


async def open_ones(endpoints: tuple[str, ...], replica_url: str, timeout_s: float) -> dict[str, str] | Unknown:
    """The endpoints on which ZeroMQ answers this machine, with the address. Endpoints that are bound to their own host
    only are left out."""
    host = urlsplit(replica_url).hostname or ""
    if is_own_host(host):  # this machine reaches all its own ports: what counts is the address that others use
        outward = outward_address()
        if outward is None and any("*" in endpoint for endpoint in endpoints):
            return Unknown("it is on this machine, whose only address is 127.0.0.1")
        host = outward or host
    targets = {endpoint: target for endpoint in endpoints if (target := target_of(endpoint, host)) is not None}
    answers = await asyncio.gather(*(_greets(*target, timeout_s) for target in targets.values()))
    return {
        endpoint: f"{target[0]} port {target[1]}"
        for (endpoint, target), answers_it in zip(targets.items(), answers, strict=True)
        if answers_it
    }


def target_of(endpoint: str, host: str) -> tuple[str, int] | None:
    """The address under which other hosts reach an endpoint of `host`; None if only its own host does."""
    parts = urlsplit(endpoint.replace("*", "[::]", 1))
    try:
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme != "tcp" or not name or not port or is_own_host(name):
        return None
    return (host if _is_wildcard(name) else name), port


def is_own_host(name: str) -> bool:
    """Whether only its own host reaches this address."""
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _is_wildcard(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_unspecified
    except ValueError:
        return False


def outward_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_FAR_AWAY)
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if is_own_host(address) else address


async def _greets(host: str, port: int, timeout_s: float) -> bool:
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            return await reader.read(1) == _GREETING
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
