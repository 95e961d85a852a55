"""Finds replicas by a Service's EndpointSlices: lists them, watches them, and lists them again.

A watch lasts _WATCH_S and is not resumed. A new list is one small answer, needs no record of versions, and corrects
whatever a watch has missed. It also limits how long a dead connection goes unnoticed.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import structlog

from gateway.logs import RareWarning
from gateway.replicas.discovery.source import SourceDown, replica_at
from gateway.settings.base import BOOTSTRAP_PORT_LABEL, ROLE_LABEL, checked_labels
from gateway.settings.discovery_settings import KubernetesSettings
from gateway.settings.gateway_settings import ReplicaSettings

_WATCH_S = 30
_ANSWER_S = 5.0
_GONE = 410
"""The listed version is too old to watch from."""
_LONGEST_REASON_CHARS = 300
_log = structlog.get_logger("kvgate.discovery")


class _Object(msgspec.Struct, rename="camel"):
    """Fields have the API's names. An empty list may be null there."""


class _Metadata(_Object):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None


class _Conditions(_Object):
    ready: bool | None = None
    terminating: bool | None = None


class _TargetRef(_Object):
    name: str = ""


class _Endpoint(_Object):
    addresses: Annotated[list[str], msgspec.Meta(min_length=1)]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    target_ref: _TargetRef | None = None

    @property
    def takes_requests(self) -> bool:
        """Whether it is ready, which is the default, and not terminating: some Services publish such pods as ready."""
        return self.conditions.ready is not False and not self.conditions.terminating


class _Port(_Object):
    name: str | None = None
    port: int | None = None


class _Slice(_Object):
    metadata: _Metadata
    address_type: str
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _SliceList(_Object):
    metadata: _Metadata
    items: list[_Slice] | None = None


class _Status(_Object):
    """The API's object for an error."""

    code: int = 0
    message: str = ""


class _Event(_Object):
    type: str
    object: msgspec.Raw


class EndpointSlices:
    """The EndpointSlices of one Service, or those with given labels."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self.name = f"kubernetes {settings.service or settings.selector}"
        self._settings = settings
        self._account = Path(settings.service_account)
        self._wrong_label = RareWarning(_log, "a Service has a wrong label")

    @property
    def retry_s(self) -> float:
        """Random, so that not all gateways ask at once."""
        return random.uniform(0.5, 1.5)

    async def follow(self) -> AsyncGenerator[list[ReplicaSettings], None]:
        try:
            async with self._client() as http:
                listed = await self._list(http)
                slices = {each.metadata.name: each for each in listed.items or ()}
                yield self._replicas(slices)
                async for event, changed in self._watch(http, listed.metadata.resource_version):
                    slices.pop(changed.metadata.name, None)
                    if event != "DELETED":
                        slices[changed.metadata.name] = changed
                    yield self._replicas(slices)
        except httpx.HTTPError as error:
            raise SourceDown(str(error) or type(error).__name__) from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise SourceDown(f"the API server's EndpointSlices cannot be used: {error}") from error

    def _client(self) -> httpx.AsyncClient:
        """A client with the current credentials: a token is valid for an hour."""
        namespace = self._settings.namespace or self._account_file("namespace")
        trusted: ssl.SSLContext | bool = True
        if self._settings.api_url.startswith("https:"):
            try:
                trusted = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
            except OSError as error:
                raise SourceDown(f"{self._account / 'ca.crt'} cannot be used: {error.strerror or error}") from None
        return httpx.AsyncClient(
            base_url=f"{self._settings.api_url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/",
            headers={"authorization": f"Bearer {self._account_file('token')}"},
            params={"labelSelector": self._settings.label_selector},
            timeout=_ANSWER_S,
            trust_env=False,
            verify=trusted,
        )

    def _account_file(self, file: str) -> str:
        try:
            return (self._account / file).read_text().strip()
        except OSError as error:
            raise SourceDown(
                f"{self._account / file} cannot be read ({error.strerror}): run as a pod with a service account, "
                "or set discovery.kubernetes.service_account to the folder of its files"
            ) from None

    async def _list(self, http: httpx.AsyncClient) -> _SliceList:
        answer = await http.get("endpointslices")
        _check(answer.status_code, answer.content)
        return msgspec.json.decode(answer.content, type=_SliceList)

    async def _watch(self, http: httpx.AsyncClient, version: str) -> AsyncIterator[tuple[str, _Slice]]:
        """The changes after `version`, until the API server ends the watch."""
        asked = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
        timeout = httpx.Timeout(_ANSWER_S, read=_WATCH_S + _ANSWER_S)
        async with http.stream("GET", "endpointslices", params=asked, timeout=timeout) as answer:
            if answer.status_code == _GONE:
                return
            if not answer.is_success:
                _check(answer.status_code, await answer.aread())
            async for line in answer.aiter_lines():
                event = msgspec.json.decode(line, type=_Event)
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=_Status)
                    if status.code == _GONE:
                        return
                    raise SourceDown(f"the API server ended the watch: {status.message[:_LONGEST_REASON_CHARS]}")
                if event.type != "BOOKMARK":
                    yield event.type, msgspec.json.decode(event.object, type=_Slice)

    def _replicas(self, slices: dict[str, _Slice]) -> list[ReplicaSettings]:
        """Each pod once. A pod with IPv4 and IPv6 addresses is in two slices, of which IPv4 sorts first. If it is in
        several Services, one with a role comes first."""
        found: dict[str, ReplicaSettings] = {}
        for each in sorted(slices.values(), key=_order):
            port = self._port(each.ports or [])
            if port is None or each.address_type not in ("IPv4", "IPv6"):
                continue
            labels = {**self._settings.labels, **self._understood(each.metadata)}
            for endpoint in each.endpoints or ():
                if endpoint.takes_requests:
                    name = endpoint.target_ref.name if endpoint.target_ref is not None else None
                    replica = replica_at(self._settings.scheme, endpoint.addresses[0], port, labels, name)
                    found.setdefault(replica.id, replica)
        return list(found.values())

    def _understood(self, told: _Metadata) -> dict[str, str]:
        """The labels that gateways understand. Kubernetes copies a Service's labels to its EndpointSlices."""
        known, labels = (ROLE_LABEL, BOOTSTRAP_PORT_LABEL), told.labels or {}
        try:
            return checked_labels({name: labels[name] for name in known if name in labels})
        except ValueError as error:
            self._wrong_label.warn(slice=told.name, problem=str(error))
            return {}

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


def _check(status: int, body: bytes) -> None:
    if status == httpx.codes.OK:
        return
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except msgspec.MsgspecError:
        message = ""
    hint = "; its role is in deploy/kubernetes/base/discovery-rbac.yaml" if status == httpx.codes.FORBIDDEN else ""
    raise SourceDown(f"the API server answered {status}: {message[:_LONGEST_REASON_CHARS]}{hint}")
