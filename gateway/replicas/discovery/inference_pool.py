"""Finds replicas by an InferencePool of the Gateway API: the pods that it selects, at its target ports.

Several target ports are servers of one pod, each of them one data-parallel rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from typing import Annotated, Any, Final, TypeVar

import msgspec

from gateway.replicas.discovery.api_server import KubernetesObject, Part, Resource, connected, retry_s, unusable
from gateway.replicas.discovery.known_labels import KnownLabels
from gateway.replicas.discovery.source import SourceDown, replica_at
from gateway.settings.discovery_settings import KubernetesSettings
from gateway.settings.gateway_settings import ReplicaSettings

POOL_GROUP: Final = "inference.networking.k8s.io"
POOL_ROLE: Final = "deploy/kubernetes/picker/rbac.yaml"
_Item = TypeVar("_Item")


class _Selector(Part):
    match_labels: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


class _TargetPort(Part):
    number: int


class _PoolSpec(Part):
    selector: _Selector
    target_ports: Annotated[list[_TargetPort], msgspec.Meta(min_length=1)]

    @property
    def label_selector(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.selector.match_labels.items())


class _Pool(KubernetesObject):
    spec: _PoolSpec


class _Condition(Part):
    type: str
    status: str


class _PodStatus(Part):
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[_Condition] | None = None


class _Pod(KubernetesObject):
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    @property
    def takes_requests(self) -> bool:
        """Whether it has an address, is ready and is not terminating."""
        is_ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions or ())
        return is_ready and bool(self.status.pod_ip) and self.metadata.deletion_timestamp is None


_POOLS = Resource(
    _Pool,
    f"{POOL_GROUP}/v1",
    "inferencepools",
    role=POOL_ROLE,
    source="the CRDs of the Gateway API's inference extension",
)
_PODS = Resource(_Pod, "", "pods", role=POOL_ROLE)


class InferencePool:
    """The ready pods of one InferencePool."""

    def __init__(self, settings: KubernetesSettings, pool: str) -> None:
        self.name = f"inference pool {pool}"
        self._settings = settings
        self._pool = pool
        self._labels = KnownLabels("a pod")

    @property
    def retry_s(self) -> float:
        return retry_s()

    async def follow(self) -> AsyncGenerator[list[ReplicaSettings], None]:
        """Ends when the pool selects other pods, or has other ports."""
        selected = {"fieldSelector": f"metadata.name={self._pool}"}
        try:
            async with connected(self._settings) as api, aclosing(api.follow(_POOLS, selected)) as answers:
                spec = self._spec(await anext(answers), api.namespace)
                pods = api.follow(_PODS, {"labelSelector": spec.label_selector})
                changed = self._changed(answers, spec, api.namespace)
                async with aclosing(pods), aclosing(_until(changed, pods)) as found:
                    async for each in found:
                        yield self._replicas(spec, each.values())
        except ValueError as error:
            raise unusable(_PODS, error) from error

    def _spec(self, found: dict[str, _Pool], namespace: str) -> _PoolSpec:
        pool = found.get(self._pool)
        if pool is None:
            raise SourceDown(
                f"the namespace {namespace} has no InferencePool {self._pool}: create it, or give another name in "
                "discovery.kubernetes.inference_pool"
            )
        return pool.spec

    async def _changed(self, answers: AsyncGenerator[dict[str, _Pool], None], spec: _PoolSpec, namespace: str) -> None:
        """Returns when the pool differs from `spec`. Its status changes, too, and does not matter."""
        async for found in answers:
            if self._spec(found, namespace) != spec:
                return

    def _replicas(self, spec: _PoolSpec, pods: Iterable[_Pod]) -> list[ReplicaSettings]:
        """A replica has the name of its pod, with its port if there are several."""
        replicas = []
        for pod in pods:
            if pod.takes_requests:
                labels = {**self._settings.labels, **self._labels.of(pod.metadata)}
                for port in (each.number for each in spec.target_ports):
                    name = pod.metadata.name if len(spec.target_ports) == 1 else f"{pod.metadata.name}-{port}"
                    replicas.append(replica_at(self._settings.scheme, pod.status.pod_ip, port, labels, name))
        return replicas


async def _until(end: Coroutine[Any, Any, None], stream: AsyncGenerator[_Item, None]) -> AsyncGenerator[_Item, None]:
    """Yields what `stream` yields, until `stream` or `end` ends. Raises what one of them raises."""
    ending = asyncio.ensure_future(end)
    waiting: list[asyncio.Task[Any]] = [ending]
    try:
        while True:
            following = asyncio.ensure_future(anext(stream, None))
            waiting = [ending, following]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                ending.result()
                return
            if (item := following.result()) is None:
                return
            yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
