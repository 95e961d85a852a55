"""Holds requests for known models while no replica can serve them, so that a pool can be scaled to zero and back.

What all gateways hold is the demand that an autoscaler sees (coordinator/pool/demand.py). When a replica is ready,
the requests are placed: bands in their order, in a band those first that have waited longest. Then they wait for room
as all others do.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from coordinator.store import Store
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.replicas.fleet import Fleet
from gateway.replicas.served import NONE_DECODES
from gateway.request.job import Job
from gateway.routing.queue_bounds import why_full
from gateway.routing.tenants import NOBODY, Tenants
from gateway.settings.queue_settings import QueueSettings


@dataclass(slots=True, eq=False)
class _Held:
    """One request that is held."""

    job: Job
    pool: str
    band: int
    since_s: float
    ready: asyncio.Future[None]


class Holds:
    """The requests that this gateway holds. `wake` is to be called whenever replicas may have become ready."""

    def __init__(self, queue: QueueSettings, fleet: Fleet, store: Store, tenants: Tenants, metrics: Metrics) -> None:
        self.use(queue)
        self._fleet = fleet
        self._store = store
        self._tenants = tenants
        self._metrics = metrics
        self._held: list[_Held] = []

    def use(self, queue: QueueSettings) -> None:
        """These hold from now on. Requests that are held already keep their time."""
        self._queue = queue

    def __repr__(self) -> str:
        return f"<Holds {len(self._held)} requests>"

    def may_hold(self, job: Job) -> bool:
        """Whether the request waits while no replica is ready. One that computes nothing, that only one replica can
        serve, or that another model may answer, does not."""
        route = job.route
        return bool(self._queue.hold_s) and job.endpoint.computes_prompt and not route.pinned and not route.fallbacks

    async def until_ready(self, job: Job, *, was_refused: bool = False) -> None:
        """Returns when a replica that may serve the request is ready; at once if it may not be held. If it
        `was_refused`, because the store knows of no ready replica, it waits for news of the replicas in any case.
        Raises a 503 after `hold_s`, and a 429 if too many are held."""
        if not self.may_hold(job) or (not was_refused and self._is_servable(job)):
            return
        route = job.route
        pool = self._store.pool(route.served.pool)
        self._refuse_if_full(job)
        now_s, hold_s = time.monotonic(), self._queue.hold_s
        route.was_held(now_s)
        held = _Held(
            job,
            pool.name,
            self._tenants.band(job.caller.tenant, job.priority),
            route.held_since_s,
            asyncio.get_running_loop().create_future(),
        )
        self._held.append(held)
        pool.held.requests += 1
        pool.held.tokens += job.prompt_tokens
        try:
            async with asyncio.timeout(route.held_since_s + hold_s - now_s):
                await held.ready
        except TimeoutError:
            why = f": {NONE_DECODES}" if self._fleet.has_only_prefills(route.backends) else ""
            why = ", and replicas of it are asleep" if any(map(self._fleet.is_asleep, route.served.replicas)) else why
            message = f"No replica became ready for this model within {hold_s:g} s{why}."
            raise ApiError(503, "no_replica", message, headers={"retry-after": "5"}) from None
        finally:
            self._held.remove(held)
            pool.held.requests -= 1
            pool.held.tokens -= job.prompt_tokens

    def _refuse_if_full(self, job: Job) -> None:
        """Raises a 429 if as many are held for the pool as may be queued there."""
        pool, tenant = job.route.served.pool, job.caller.tenant or NOBODY
        why = why_full(
            ((held.band, held.job.caller.tenant or NOBODY) for held in self._held if held.pool == pool),
            self._tenants.band(job.caller.tenant, job.priority),
            tenant,
            most=self._queue.max_waiting,
            most_of_tenant=self._queue.max_waiting_per_tenant,
        )
        if why:
            whose = "of yours " if why == "full_tenant" else ""
            message = f"No replica is ready, and too many requests {whose}wait for one already."
            self._metrics.queue_refusals.inc(why)
            raise ApiError(429, "queue_full", message, headers={"retry-after": "5"})

    def wake(self) -> None:
        """Let those go that can be served now."""
        for held in sorted(self._held, key=lambda held: (held.band, held.since_s)):
            if not held.ready.done() and self._is_servable(held.job):
                held.ready.set_result(None)

    def _is_servable(self, job: Job) -> bool:
        """Whether a replica is ready for the request. Its model may have got other replicas since it was read."""
        job.route.renew(self._fleet)
        return any(self._fleet.is_ready(replica) for backend in job.route.backends for replica in backend.replicas)
