"""The part of a Kubernetes API server that lists and watches objects, over real HTTP, with versions.

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

import yaml
from aiohttp import web

from tests.web_server import serving

ROLE_FILE = Path(__file__).resolve().parents[4] / "deploy" / "kubernetes" / "picker" / "rbac.yaml"
TOKEN = "a token"
SLICES = "discovery.k8s.io/v1/endpointslices"
PODS = "v1/pods"
POOLS = "inference.networking.k8s.io/v1/inferencepools"
OBJECTIVES = "llm-d.ai/v1alpha2/inferenceobjectives"
OLD_OBJECTIVES = "inference.networking.x-k8s.io/v1alpha2/inferenceobjectives"


def endpoint(name: str, address: str, **conditions: bool | None) -> dict[str, Any]:
    """One pod. It is ready unless `conditions` says otherwise."""
    said = {"ready": True, "serving": True, "terminating": False} | conditions
    target = {"targetRef": {"kind": "Pod", "name": name, "namespace": "models"}} if name else {}
    return {"addresses": [address], "conditions": said, "nodeName": "node-1", **target}


def ports(**numbers: int) -> list[dict[str, Any]]:
    return [{"name": name, "port": port, "protocol": "TCP"} for name, port in numbers.items()]


def pod(address: str, *, ready: bool | None = True, terminating: bool = False, **labels: str) -> dict[str, Any]:
    """The arguments of `KubernetesApi.put_object` for a pod; `ready` is None before its first probe."""
    conditions = [{"type": "PodScheduled", "status": "True"}]
    if ready is not None:
        conditions.append({"type": "Ready", "status": str(ready)})
    status = {"conditions": conditions, **({"podIP": address} if address else {})}
    deletion = {"deletionTimestamp": "2026-11-29T12:00:00Z"} if terminating else {}
    return {"status": status, "labels": labels, "deletion": deletion}


def pool(*target_ports: int, **match_labels: str) -> dict[str, Any]:
    """The arguments of `KubernetesApi.put_object` for an InferencePool."""
    at = [{"number": number} for number in target_ports]
    picker = {"name": "picker", "port": {"number": 9002}}
    return {"spec": {"selector": {"matchLabels": match_labels}, "targetPorts": at, "endpointPickerRef": picker}}


def objective(pool: str, priority: int | None, group: str | None = "inference.networking.k8s.io") -> dict[str, Any]:
    """The arguments of `KubernetesApi.put_object` for an InferenceObjective."""
    ref = {"name": pool, "kind": "InferencePool", **({"group": group} if group is not None else {})}
    return {"spec": {"poolRef": ref, **({"priority": priority} if priority is not None else {})}}


class KubernetesApi:
    """`put`, `put_object` and `delete` change objects. If `fault` is set, it replaces every answer."""

    def __init__(self) -> None:
        self.url = ""
        self.fault = 0
        """The status of every answer; 0: none."""
        self.hangs = False
        self.served = {SLICES, PODS, POOLS, OBJECTIVES}
        """Of a resource that is not here, no definition is installed."""
        self.rules: list[dict[str, list[str]]] | None = None
        """Those of the client's Role; None: it may do everything."""
        self.lists: list[dict[str, str]] = []
        """The queries of all lists. `watches` has those of all watches."""
        self.watches: list[dict[str, str]] = []
        self._version = 100
        self._oldest = 100
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        """By resource and name."""
        self._log: list[tuple[int, str, dict[str, Any] | None, dict[str, Any] | None]] = []
        """Version, resource, and the object before and after it."""
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
        labels = {"kubernetes.io/service-name": service, **labels}
        fields = {"addressType": address_type, "endpoints": endpoints, "ports": at}
        await self.put_object(SLICES, name, namespace=namespace, labels=labels, **fields)

    async def put_object(
        self,
        resource: str,
        name: str,
        *,
        namespace: str = "models",
        labels: Mapping[str, str] = {},
        deletion: Mapping[str, str] = {},
        **fields: Any,
    ) -> None:
        """Adds or replaces an object."""
        metadata = {"name": name, "namespace": namespace, "labels": labels, **deletion}
        await self._change(resource, name, {"metadata": metadata, **fields})

    async def delete(self, name: str, resource: str = SLICES) -> None:
        await self._change(resource, name, None)

    async def bookmark(self) -> None:
        """Sends a bookmark: a change elsewhere has increased the version."""
        self._version += 1
        await self._tell("", None, {"metadata": {"resourceVersion": str(self._version)}})

    async def compact(self) -> None:
        """Forgets all changes. A watch from an earlier version gets a 410."""
        async with self._news:
            self._oldest = self._version = self._version + 1
            self._log.clear()
            self._news.notify_all()

    async def cut(self) -> None:
        """Breaks the connections of all watches."""
        self._cut.set()
        self._cut = asyncio.Event()
        async with self._news:
            self._news.notify_all()

    async def _change(self, resource: str, name: str, found: dict[str, Any] | None) -> None:
        self._version += 1
        before = self._objects.pop((resource, name), None)
        if found is not None:
            found = found | {"metadata": found["metadata"] | {"resourceVersion": str(self._version)}}
            self._objects[resource, name] = found
        await self._tell(resource, before, found)

    async def _tell(self, resource: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
        self._log.append((self._version, resource, before, after))
        async with self._news:
            self._news.notify_all()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.hangs:
            await asyncio.Event().wait()
        if self.fault:
            return _status(self.fault, f"told to answer {self.fault}")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        group, plural = request.match_info.get("group", ""), request.match_info["plural"]
        verb = "watch" if "watch" in request.query else "list"
        if self.rules is not None and not any(
            group in rule["apiGroups"] and plural in rule["resources"] and verb in rule["verbs"] for rule in self.rules
        ):
            return _status(403, f"cannot {verb} resource {plural} in API group {group}")
        resource = f"{group}/{request.match_info['version']}/{plural}".removeprefix("/")
        if resource not in self.served:
            return web.Response(status=404, text="404 page not found\n")
        if verb == "watch":
            return await self._watch(resource, request)
        self.lists.append(dict(request.query))
        items = [each for (kind, _), each in self._objects.items() if kind == resource and _is_selected(each, request)]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, resource: str, request: web.Request) -> web.StreamResponse:
        self.watches.append(dict(request.query))
        version, cut = int(request.query["resourceVersion"]), self._cut
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while not cut.is_set():
                    if version < self._oldest:
                        message = f"too old resource version: {version}"
                        gone = {"kind": "Status", "status": "Failure", "code": 410, "message": message}
                        await response.write(_line("ERROR", gone))
                        return response
                    for number, kind, before, after in [entry for entry in self._log if entry[0] > version]:
                        if kind in (resource, "") and (line := _seen(before, after, request, is_bookmark=not kind)):
                            await response.write(line)
                        version = number
                    async with self._news:
                        if self._version == version and not cut.is_set():
                            await self._news.wait()
        except TimeoutError:
            return response
        if request.transport is not None:
            request.transport.abort()
        return response


def _seen(
    before: dict[str, Any] | None, after: dict[str, Any] | None, request: web.Request, *, is_bookmark: bool
) -> bytes:
    """What a watch with selectors sees of a change: an object that it no longer selects is deleted for it."""
    if is_bookmark:
        return _line("BOOKMARK", after)
    was, is_selected = _is_selected(before, request), _is_selected(after, request)
    if is_selected:
        return _line("MODIFIED" if was else "ADDED", after)
    return _line("DELETED", before) if was else b""


def _is_selected(found: dict[str, Any] | None, request: web.Request) -> bool:
    if found is None or request.match_info["namespace"] != found["metadata"]["namespace"]:
        return False
    labels, fields = (_pairs(request.query.get(name, "")) for name in ("labelSelector", "fieldSelector"))
    assert fields.keys() <= {"metadata.name"}
    has_name = fields.get("metadata.name") in (None, found["metadata"]["name"])
    return has_name and labels.items() <= found["metadata"]["labels"].items()


def _pairs(selector: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in selector.split(",") if pair)


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code)


def _line(event: str, found: dict[str, Any] | None) -> bytes:
    return json.dumps({"type": event, "object": found}).encode() + b"\n"


@asynccontextmanager
async def running_kubernetes(tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[KubernetesApi]:
    api, app = KubernetesApi(), web.Application()
    for path in ("/api/{version}", "/apis/{group}/{version}"):
        app.router.add_get(path + "/namespaces/{namespace}/{plural}", api.answer)
    async with serving(app, port, tls) as api.url:
        try:
            yield api
        finally:
            await api.cut()


@asynccontextmanager
async def running_for_pickers() -> AsyncIterator[KubernetesApi]:
    """It grants what the file of a picker's rights does, and nothing else."""
    (role,) = [each for each in yaml.safe_load_all(ROLE_FILE.read_text()) if each["kind"] == "Role"]
    async with running_kubernetes() as api:
        api.rules = role["rules"]
        yield api


def service_account(folder: Path, namespace: str = "models", token: str = TOKEN) -> Path:
    """The files that Kubernetes mounts into a pod, without the certificate."""
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(token + "\n")
    (folder / "namespace").write_text(namespace)
    return folder
