"""The priorities that InferenceObjectives give to requests.

An InferenceObjective is an object in Kubernetes that refers to an InferencePool. A request names it in a header, which
counts only if the configuration says that a proxy sets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import Final

import structlog

from gateway.replicas.discovery.api_server import (
    ApiServer,
    KubernetesObject,
    NotServed,
    Part,
    Resource,
    connected,
    retry_s,
)
from gateway.replicas.discovery.inference_pool import POOL_GROUP, POOL_ROLE
from gateway.replicas.discovery.source import SourceDown
from gateway.settings.discovery_settings import DiscoverySettings, KubernetesSettings
from gateway.tasks import Tasks

_log = structlog.get_logger("kvgate.objectives")


class _PoolRef(Part):
    name: str
    group: str = POOL_GROUP


class _Spec(Part):
    pool_ref: _PoolRef
    priority: int | None = None


class _Objective(KubernetesObject):
    spec: _Spec


_RESOURCES: Final = [
    Resource(_Objective, group, "inferenceobjectives", role=POOL_ROLE)
    for group in ("llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2")
]
"""llm-d defines them now; the Gateway API's inference extension did before. The first one that is served counts."""


class Objectives:
    """The InferenceObjectives of the pool that is followed, if the configuration names a header for them. `run()` as a
    task."""

    def __init__(self, settings: DiscoverySettings) -> None:
        self._tasks = Tasks()
        self._following: asyncio.Task[None] | None = None
        self._use(_followed(settings))

    def _use(self, followed: KubernetesSettings | None) -> None:
        self._followed = followed
        self._header = followed.objective_header if followed is not None else None
        self._priorities: Mapping[str, int] = {}
        self._problem = "not asked yet"
        self._asked = asyncio.Event()
        if followed is None:
            self._asked.set()

    def use(self, settings: DiscoverySettings) -> None:
        """Follow these from now on."""
        followed = _followed(settings)
        if followed != self._followed:
            if self._following is not None:
                self._following.cancel()
            self._use(followed)
            self._begin()

    def priority(self, headers: Mapping[str, str]) -> int | None:
        """The priority of a request with these headers; None if it names no objective that exists."""
        return self._priorities.get(headers.get(self._header, "")) if self._header is not None else None

    def problems(self) -> dict[str, str]:
        """The problem under the name of this lookup; empty while it works. What was found last stays valid."""
        pool = self._followed.inference_pool if self._followed is not None else None
        return {f"objectives of {pool}": self._problem} if pool is not None else {}

    async def first_answer(self) -> None:
        """Wait until the API server has answered or failed once."""
        await self._asked.wait()

    async def run(self) -> None:
        """Follow them until cancelled."""
        self._begin()
        await self._tasks.until_cancelled()

    def _begin(self) -> None:
        if self._followed is not None:
            self._following = self._tasks.keep(partial(self._follow, self._followed), "objectives")

    async def _follow(self, settings: KubernetesSettings) -> None:
        while True:
            try:
                async with connected(settings) as api:
                    await self._follow_served(api, _PoolRef(settings.inference_pool or ""))
            except SourceDown as error:
                self._failed(str(error))
            await asyncio.sleep(retry_s())

    async def _follow_served(self, api: ApiServer, pool: _PoolRef) -> None:
        """Returns when the watch ends. Raises SourceDown."""
        for resource in _RESOURCES:
            try:
                async with aclosing(api.follow(resource, {})) as answers:
                    async for found in answers:
                        ours = {name: each.spec for name, each in found.items() if each.spec.pool_ref == pool}
                        self._answered({name: spec.priority or 0 for name, spec in ours.items()})
                return
            except NotServed:
                continue
        groups = " nor ".join(resource.group for resource in _RESOURCES)
        raise SourceDown(
            f"the API server serves no InferenceObjectives of {groups}: install their CRD, or leave out "
            "discovery.kubernetes.objective_header"
        )

    def _answered(self, priorities: Mapping[str, int]) -> None:
        if self._problem:
            _log.info("InferenceObjectives are looked up", found=len(priorities))
        self._problem = ""
        self._priorities = priorities
        self._asked.set()

    def _failed(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("InferenceObjectives cannot be looked up; those found last stay", problem=problem)
        self._problem = problem
        self._asked.set()


def _followed(settings: DiscoverySettings) -> KubernetesSettings | None:
    """Where they are to be found; None if no header is configured for them."""
    kubernetes = settings.kubernetes
    return kubernetes if kubernetes is not None and kubernetes.objective_header is not None else None
