"""Follows objects of the Kubernetes API server: lists them, watches them, and lists them again.

A watch lasts _WATCH_S and is not resumed. A new list is one small answer, needs no record of versions, and corrects
whatever a watch has missed. It also limits how long a dead connection goes unnoticed.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import httpx
import msgspec

from gateway.replicas.discovery.source import SourceDown
from gateway.settings.discovery_settings import KubernetesSettings

_WATCH_S = 30
_ANSWER_S = 5.0
_GONE = 410
"""The listed version is too old to watch from."""
_LONGEST_REASON_CHARS = 300


class Part(msgspec.Struct, rename="camel"):
    """A part of an object. Fields have the API's names. An empty list may be null there."""


class Metadata(Part):
    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None


class KubernetesObject(Part):
    metadata: Metadata


Kind = TypeVar("Kind", bound=KubernetesObject)


@dataclass(frozen=True)
class Resource(Generic[Kind]):
    """A kind of objects, as the API server serves it."""

    kind: type[Kind]
    group: str
    """With its version; "" for that of pods."""
    plural: str
    role: str
    """The file with the rights to list and watch it."""
    source: str = ""
    """What to install if the API server does not serve it."""

    @property
    def path(self) -> str:
        return f"apis/{self.group}" if self.group else "api/v1"


class NotServed(SourceDown):
    """The API server does not have this resource."""


class _List(Part):
    metadata: Metadata
    items: list[msgspec.Raw] | None = None


class _Status(Part):
    """The API's object for an error."""

    code: int = 0
    message: str = ""


class _Event(Part):
    type: str
    object: msgspec.Raw


def retry_s() -> float:
    """The wait before objects are listed again. Random, so that not all gateways ask at once."""
    return random.uniform(0.5, 1.5)


@asynccontextmanager
async def connected(settings: KubernetesSettings) -> AsyncIterator[ApiServer]:
    """A connection with the current credentials: a token is valid for an hour. Raises SourceDown."""
    account = Path(settings.service_account)
    namespace = settings.namespace or _read(account / "namespace")
    trusted: ssl.SSLContext | bool = True
    if settings.api_url.startswith("https:"):
        try:
            trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise SourceDown(f"{account / 'ca.crt'} cannot be used: {error.strerror or error}") from None
    async with httpx.AsyncClient(
        base_url=settings.api_url,
        headers={"authorization": f"Bearer {_read(account / 'token')}"},
        timeout=_ANSWER_S,
        trust_env=False,
        verify=trusted,
    ) as http:
        yield ApiServer(http, namespace)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        raise SourceDown(
            f"{file} cannot be read ({error.strerror}): run as a pod with a service account, "
            "or set discovery.kubernetes.service_account to the folder of its files"
        ) from None


class ApiServer:
    """The API server, for the objects of one namespace."""

    def __init__(self, http: httpx.AsyncClient, namespace: str) -> None:
        self._http = http
        self.namespace = namespace

    async def follow(self, resource: Resource[Kind], selected: dict[str, str]) -> AsyncGenerator[dict[str, Kind], None]:
        """Yields all selected objects by name, at once and after each change, until the watch ends. Raises
        SourceDown."""
        try:
            listed = await self._list(resource, selected)
            decoded = (msgspec.json.decode(each, type=resource.kind) for each in listed.items or ())
            found = {each.metadata.name: each for each in decoded}
            yield found
            async for event, changed in self._watch(resource, selected, listed.metadata.resource_version):
                found.pop(changed.metadata.name, None)
                if event != "DELETED":
                    found[changed.metadata.name] = changed
                yield found
        except httpx.HTTPError as error:
            raise SourceDown(str(error) or type(error).__name__) from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise unusable(resource, error) from error

    def _path(self, resource: Resource[Kind]) -> str:
        return f"/{resource.path}/namespaces/{self.namespace}/{resource.plural}"

    async def _list(self, resource: Resource[Kind], selected: dict[str, str]) -> _List:
        answer = await self._http.get(self._path(resource), params=selected)
        _check(resource, answer.status_code, answer.content)
        return msgspec.json.decode(answer.content, type=_List)

    async def _watch(
        self, resource: Resource[Kind], selected: dict[str, str], version: str
    ) -> AsyncIterator[tuple[str, Kind]]:
        """The changes after `version`, until the API server ends the watch."""
        asked = {**selected, "watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
        timeout = httpx.Timeout(_ANSWER_S, read=_WATCH_S + _ANSWER_S)
        async with self._http.stream("GET", self._path(resource), params=asked, timeout=timeout) as answer:
            if answer.status_code == _GONE:
                return
            if not answer.is_success:
                _check(resource, answer.status_code, await answer.aread())
            async for line in answer.aiter_lines():
                event = msgspec.json.decode(line, type=_Event)
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=_Status)
                    if status.code == _GONE:
                        return
                    raise SourceDown(f"the API server ended the watch: {status.message[:_LONGEST_REASON_CHARS]}")
                if event.type != "BOOKMARK":
                    yield event.type, msgspec.json.decode(event.object, type=resource.kind)


def unusable(resource: Resource[Kind], error: Exception) -> SourceDown:
    """What to raise if the contents of an object are wrong."""
    return SourceDown(f"the API server's {resource.plural} cannot be used: {error}")


def _check(resource: Resource[Kind], status: int, body: bytes) -> None:
    if status == httpx.codes.OK:
        return
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except msgspec.MsgspecError:
        message = ""
    told = f"the API server answered {status}: {message[:_LONGEST_REASON_CHARS]}"
    if status == httpx.codes.NOT_FOUND:
        fix = f": install {resource.source}" if resource.source else ""
        raise NotServed(f"{told}; it serves no {resource.plural} of {resource.group or 'v1'}{fix}")
    if status == httpx.codes.FORBIDDEN:
        told += f"; allow list and watch of {resource.plural}, as {resource.role} does"
    raise SourceDown(told)
