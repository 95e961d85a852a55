"""The part of a Kubernetes API server that serves EndpointSlices, over real HTTP: lists and watches with versions.

A watch sends all changes after the version that it names, one line of JSON each, with BOOKMARKs in between. It ends at
the requested timeout. A watch from a version older than the oldest stored change gets a 410 in an ERROR event, as from
a real server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.web_server import serving

TOKEN = "a token"


def endpoint(name: str, address: str, **conditions: bool | None) -> dict[str, Any]:
    """One pod. It is ready unless `conditions` says otherwise."""
    said = {"ready": True, "serving": True, "terminating": False} | conditions
    target = {"targetRef": {"kind": "Pod", "name": name, "namespace": "models"}} if name else {}
    return {"addresses": [address], "conditions": said, "nodeName": "node-1", **target}


def ports(**numbers: int) -> list[dict[str, Any]]:
    return [{"name": name, "port": port, "protocol": "TCP"} for name, port in numbers.items()]


class KubernetesApi:
    """`put` and `delete` change the slices. If `fault` is set, it replaces every answer."""

    def __init__(self) -> None:
        self.url = ""
        self.fault = 0
        """The status of every answer; 0: none."""
        self.hangs = False
        self.lists: list[dict[str, str]] = []
        """The queries of all lists. `watches` has those of all watches."""
        self.watches: list[dict[str, str]] = []
        self._version = 100
        self._oldest = 100
        self._slices: dict[str, dict[str, Any]] = {}
        self._log: list[tuple[int, str, dict[str, Any]]] = []
        self._news = asyncio.Condition()
        self._cut = asyncio.Event()

    async def put(
        self,
        name: str,
        endpoints: list[dict[str, Any]] | None,
        at: list[dict[str, Any]],
        service: str = "vllm",
        address_type: str = "IPv4",
        namespace: str = "models",
        labels: Mapping[str, str] = {},
    ) -> None:
        """Adds or replaces a slice. `labels` are the Service's own."""
        event = "MODIFIED" if name in self._slices else "ADDED"
        labels = {"kubernetes.io/service-name": service, **labels}
        await self._change(
            event,
            {
                "metadata": {"name": name, "namespace": namespace, "labels": labels},
                "addressType": address_type,
                "endpoints": endpoints,
                "ports": at,
            },
        )

    async def delete(self, name: str) -> None:
        await self._change("DELETED", self._slices[name])

    async def bookmark(self) -> None:
        """Sends a bookmark: a change elsewhere has increased the version."""
        self._version += 1
        metadata = {"resourceVersion": str(self._version)}
        await self._tell("BOOKMARK", {"kind": "EndpointSlice", "metadata": metadata})

    async def compact(self) -> None:
        """Forgets all changes. A watch from an earlier version gets a 410."""
        self._oldest = self._version = self._version + 1
        self._log.clear()
        await self.cut()

    async def cut(self) -> None:
        """Breaks the connections of all watches."""
        self._cut.set()
        self._cut = asyncio.Event()
        async with self._news:
            self._news.notify_all()

    async def _change(self, event: str, found: dict[str, Any]) -> None:
        self._version += 1
        found = found | {"metadata": found["metadata"] | {"resourceVersion": str(self._version)}}
        if event == "DELETED":
            del self._slices[found["metadata"]["name"]]
        else:
            self._slices[found["metadata"]["name"]] = found
        await self._tell(event, found)

    async def _tell(self, event: str, found: dict[str, Any]) -> None:
        self._log.append((self._version, event, found))
        async with self._news:
            self._news.notify_all()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.hangs:
            await asyncio.Event().wait()
        if self.fault:
            return _status(self.fault, f"told to answer {self.fault}")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if "watch" in request.query:
            return await self._watch(request)
        self.lists.append(dict(request.query))
        items = [found for found in self._slices.values() if _is_selected(found, request)]
        metadata = {"resourceVersion": str(self._version)}
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches.append(dict(request.query))
        version, cut = int(request.query["resourceVersion"]), self._cut
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        if version < self._oldest:
            gone = {
                "kind": "Status",
                "status": "Failure",
                "code": 410,
                "message": f"too old resource version: {version}",
            }
            await response.write(_line("ERROR", gone))
            return response
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while not cut.is_set():
                    for number, event, found in [entry for entry in self._log if entry[0] > version]:
                        if event == "BOOKMARK" or _is_selected(found, request):
                            await response.write(_line(event, found))
                        version = number
                    async with self._news:
                        if self._version == version and not cut.is_set():
                            await self._news.wait()
        except TimeoutError:
            return response
        if request.transport is not None:
            request.transport.abort()
        return response


def _is_selected(found: dict[str, Any], request: web.Request) -> bool:
    name, _, value = request.query["labelSelector"].partition("=")
    is_here = request.match_info["namespace"] == found["metadata"]["namespace"]
    return is_here and found["metadata"]["labels"].get(name) == value


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code)


def _line(event: str, found: dict[str, Any]) -> bytes:
    return json.dumps({"type": event, "object": found}).encode() + b"\n"


@asynccontextmanager
async def running_kubernetes(tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[KubernetesApi]:
    api, app = KubernetesApi(), web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", api.answer)
    async with serving(app, port, tls) as api.url:
        try:
            yield api
        finally:
            await api.cut()


def service_account(folder: Path, namespace: str = "models", token: str = TOKEN) -> Path:
    """The files that Kubernetes mounts into a pod, without the certificate."""
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(token + "\n")
    (folder / "namespace").write_text(namespace)
    return folder
