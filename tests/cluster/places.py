"""Test servers in which gateways look for replicas: a name in a DNS server, a Service in a Kubernetes API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from bench.cluster import SimReplica
from tests.forked import constants
from tests.gateway.replicas.discovery.dns_server import DnsServer, running_dns
from tests.gateway.replicas.discovery.kubernetes_api import (
    KubernetesApi,
    endpoint,
    ports,
    running_kubernetes,
    service_account,
)

INTERVAL_S = 0.5
_SRV = "_http._tcp.vllm.test"


class Place(Protocol):
    """A source of the list of replicas."""

    @property
    def discovery(self) -> dict[str, Any]:
        """The section of a gateway's configuration that points here."""
        ...

    def id_of(self, server: SimReplica) -> str:
        """The id of a replica that is found here."""
        ...

    async def hold(self, servers: Sequence[SimReplica]) -> None:
        """Lists exactly these replicas from now on."""
        ...

    async def fail(self) -> None:
        """Stops answering."""
        ...

    def mend(self) -> None: ...


class DnsPlace:
    def __init__(self, server: DnsServer) -> None:
        self._server = server
        self.discovery = {"dns": {"names": [_SRV], "server": server.address}}

    def id_of(self, server: SimReplica) -> str:
        return f"127.0.0.1-{server.port}"

    async def hold(self, servers: Sequence[SimReplica]) -> None:
        self._server.records["host.test."] = ["A 127.0.0.1"]
        self._server.records[f"{_SRV}."] = ["TXT of a service"] + [
            f"SRV 0 0 {server.port} host.test." for server in servers
        ]

    async def fail(self) -> None:
        self._server.fault = "silent"

    def mend(self) -> None:
        self._server.fault = ""


class KubernetesPlace:
    """Each replica has its own slice, because their ports differ."""

    def __init__(self, api: KubernetesApi, folder: Path) -> None:
        self._api = api
        account = str(service_account(folder / "account"))
        self.discovery = {
            "kubernetes": {"service": "vllm", "port": "http", "api_url": api.url, "service_account": account}
        }
        self._held: list[str] = []

    def id_of(self, server: SimReplica) -> str:
        return f"vllm-{server.port}"

    async def hold(self, servers: Sequence[SimReplica]) -> None:
        names = [self.id_of(server) for server in servers]
        for name in set(self._held) - set(names):
            await self._api.delete(f"slice-of-{name}")
        for name, server in zip(names, servers, strict=True):
            if name not in self._held:
                await self._api.put(f"slice-of-{name}", [endpoint(name, "127.0.0.1")], ports(http=server.port))
        self._held = names

    async def fail(self) -> None:
        self._api.fault = 503
        await self._api.cut()

    def mend(self) -> None:
        self._api.fault = 0


@asynccontextmanager
async def running_place(kind: str, folder: Path) -> AsyncIterator[Place]:
    if kind == "dns":
        async with running_dns() as server:
            with constants({"gateway.replicas.discovery.dns.INTERVAL_S": INTERVAL_S}):
                yield DnsPlace(server)
    else:
        async with running_kubernetes() as api:
            yield KubernetesPlace(api, folder)
