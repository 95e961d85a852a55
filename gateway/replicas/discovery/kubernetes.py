"""Finds replicas by a Service's EndpointSlices."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import msgspec

from gateway.replicas.discovery.api_server import KubernetesObject, Part, Resource, connected, retry_s, unusable
from gateway.replicas.discovery.known_labels import KnownLabels
from gateway.replicas.discovery.source import SourceDown, replica_at
from gateway.settings.base import ROLE_LABEL
from gateway.settings.discovery_settings import KubernetesSettings
from gateway.settings.gateway_settings import ReplicaSettings


class _Conditions(Part):
    ready: bool | None = None
    terminating: bool | None = None


class _TargetRef(Part):
    name: str = ""


class _Endpoint(Part):
    addresses: Annotated[list[str], msgspec.Meta(min_length=1)]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    target_ref: _TargetRef | None = None

    @property
    def takes_requests(self) -> bool:
        """Whether it is ready, which is the default, and not terminating: some Services publish such pods as ready."""
        return self.conditions.ready is not False and not self.conditions.terminating


class _Port(Part):
    name: str | None = None
    port: int | None = None


class _Slice(KubernetesObject):
    address_type: str
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


_SLICES = Resource(_Slice, "discovery.k8s.io/v1", "endpointslices", role="deploy/kubernetes/base/discovery-rbac.yaml")


class EndpointSlices:
    """The EndpointSlices of one Service, or those with given labels."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self.name = f"kubernetes {settings.service or settings.selector}"
        self._settings = settings
        self._labels = KnownLabels("a Service")

    @property
    def retry_s(self) -> float:
        return retry_s()

    async def follow(self) -> AsyncGenerator[list[ReplicaSettings], None]:
        selected = {"labelSelector": self._settings.label_selector}
        try:
            async with connected(self._settings) as api, aclosing(api.follow(_SLICES, selected)) as answers:
                async for slices in answers:
                    yield self._replicas(slices)
        except ValueError as error:
            raise unusable(_SLICES, error) from error

    def _replicas(self, slices: dict[str, _Slice]) -> list[ReplicaSettings]:
        """Each pod once. A pod with IPv4 and IPv6 addresses is in two slices, of which IPv4 sorts first. If it is in
        several Services, one with a role comes first."""
        found: dict[str, ReplicaSettings] = {}
        for each in sorted(slices.values(), key=_order):
            port = self._port(each.ports or [])
            if port is None or each.address_type not in ("IPv4", "IPv6"):
                continue
            labels = {**self._settings.labels, **self._labels.of(each.metadata)}
            for endpoint in each.endpoints or ():
                if endpoint.takes_requests:
                    name = endpoint.target_ref.name if endpoint.target_ref is not None else None
                    replica = replica_at(self._settings.scheme, endpoint.addresses[0], port, labels, name)
                    found.setdefault(replica.id, replica)
        return list(found.values())

    def _port(self, ports: list[_Port]) -> int | None:
        """The port with the configured name, or else the only port; None while the Service has no such port."""
        if self._settings.port is not None:
            ports = [port for port in ports if port.name == self._settings.port]
        if len(ports) > 1:
            names = ", ".join(port.name or "unnamed" for port in ports)
            raise SourceDown(f"the service has several ports: name one of {names} in discovery.kubernetes.port")
        return ports[0].port if ports else None


def _order(one: _Slice) -> tuple[str, bool, str]:
    return one.address_type, ROLE_LABEL not in (one.metadata.labels or {}), one.metadata.name
