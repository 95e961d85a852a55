"""Finds replicas by a DNS name's addresses or SRV records.

Asks again every INTERVAL_S, and caches nothing. The meaning of the answers:

    addresses                all replicas
    the name has no address  there are no replicas, by authority
    anything else            unknown: no such name (Kubernetes answers this if no pod is ready), SERVFAIL, no answer
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.name import Name
from dns.resolver import NXDOMAIN

from gateway.replicas.discovery.source import SourceDown, replica_at
from gateway.settings.discovery_settings import DnsSettings
from gateway.settings.gateway_settings import ReplicaSettings

INTERVAL_S = 2.0
"""A DNS server answers from memory, so this costs it little. Health checks need as long to find a dead replica."""
_LOOK_S = 5.0


class DnsName:
    """One name to look up."""

    def __init__(self, name: str, settings: DnsSettings) -> None:
        self.name = f"dns {name}"
        self.retry_s = INTERVAL_S
        self._asked = name
        self._settings = settings

    async def follow(self) -> AsyncGenerator[list[ReplicaSettings], None]:
        while True:
            try:
                places = await self._places(self._resolver())
            except DNSException as error:
                raise SourceDown(str(error)) from error
            finally:
                _heed_cancellation()
            told = self._settings
            yield [replica_at(told.scheme, address, port, told.labels) for address, port in places]
            await asyncio.sleep(INTERVAL_S)

    def _resolver(self) -> Resolver:
        """Created for each lookup, because the host's resolv.conf may change."""
        server = self._settings.server
        resolver = Resolver(configure=server is None)
        resolver.lifetime = _LOOK_S
        if server is not None:
            parts = urlsplit(f"//{server}")
            resolver.nameservers, resolver.port = [parts.hostname or ""], parts.port or 53
        return resolver

    async def _places(self, resolver: Resolver) -> list[tuple[str, int]]:
        if not self._asked.startswith("_"):
            return [(address, self._settings.port) for address in await _addresses(resolver, self._asked)]
        answer = await resolver.resolve(self._asked, "SRV", search=True, raise_on_no_answer=False)
        records = list(answer) if answer.rrset is not None else []
        targets = await asyncio.gather(*(_addresses_of_target(resolver, record.target) for record in records))
        return [(address, record.port) for record, found in zip(records, targets, strict=True) for address in found]


async def _addresses(resolver: Resolver, name: str | Name) -> list[str]:
    """The IPv4 addresses, or else the IPv6 addresses: a replica that has both is one replica."""
    for kind in ("A", "AAAA"):
        answer = await resolver.resolve(name, kind, search=True, raise_on_no_answer=False)
        if answer.rrset is not None:
            return [record.address for record in answer]
    return []


async def _addresses_of_target(resolver: Resolver, target: Name) -> list[str]:
    """The addresses of an SRV record's target. A missing target has none; it must not hide the others."""
    try:
        return await _addresses(resolver, target)
    except NXDOMAIN:
        return []


def _heed_cancellation() -> None:
    """Raise a cancellation that came together with an answer: dnspython loses it (wait_for, Python < 3.12)."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
