"""Shares the requests of a model among its backends by their weights, exactly over all gateways: the store counts.

While the store is away, and in a Redis Cluster, gateways share by hashing conversations: about so, and all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from coordinator.errors import StoreError
from coordinator.keys import pool_slug
from coordinator.placement import Answer
from coordinator.pool.routed import Split, Way, choose_way
from coordinator.store import Store
from gateway.replicas.offers import Offer
from gateway.request.job import Job
from gateway.routing.local_queue import LocalQueue
from gateway.routing.pool_choice import PoolChoice
from gateway.routing.questions import Question, Questions
from gateway.routing.tenants import NOBODY


class Weighted:
    """The choices of one gateway."""

    def __init__(
        self,
        namespace: str,
        store: Store,
        choice: PoolChoice,
        questions: Questions,
        local: LocalQueue,
        note: Callable[[str, StoreError], object],
    ) -> None:
        """`note` is told of placements for which the store has given no answer."""
        self._namespace, self._store, self._choice = namespace, store, choice
        self._questions, self._local, self._note = questions, local, note

    async def first(self, job: Job, since_ms: int) -> Question | None:
        """Lets the store choose among the backends of the request's model, and aims the request at one. None if there
        is nothing to choose, or nobody who counts."""
        backends = self._choice.ways(job) if self._store.has_one_slot else []
        if len(backends) < 2:
            return None
        route = job.route
        assert route.offer is not None
        ways = []
        for backend in backends:
            option = route.offer.options[backend.option]
            route.aim(backend)
            pool = self._store.pool(route.served.pool)
            request = self._questions.ask(job, pool, (), "", since_ms)
            request.has_waited(route.waited_s)
            if route.waited_s:
                request.has_counted()  # by another pool
            if self._local.would_overtake(pool, request):
                self._choice.aim(job)
                return None
            ways.append(Way(pool.placer, request, option.name, option.weight or 1))
        # The store takes least time for a request that goes the first way.
        by_weight = sorted(ways, key=lambda way: -way.weight)
        answer: Answer | str | None
        try:
            way, answer = await choose_way(by_weight, self._split(job, route.offer))
        except StoreError as error:
            self._choice.aim(job)
            self._note(route.served.pool, error)
            # Another backend may have become ready while the store was asked.
            way, answer = next((each for each in ways if each.backend == route.served.option), ways[0]), "away"
        chosen = backends[ways.index(way)]
        route.aim(chosen)
        route.chose(chosen.option)
        return Question(self._store.pool(chosen.pool), way.request, answer)

    def _split(self, job: Job, offer: Offer) -> Split:
        conversation = conversation_of(job) if offer.is_sticky else ""
        prompt = job.route.prompt
        has_begun = bool(conversation) and (bool(job.session) or prompt is None or prompt.answer != (0, 0))
        return Split(self._namespace, pool_slug(offer.model), conversation, has_begun)


def conversation_of(job: Job) -> str:
    """32 hex that name the conversation of this tenant: by what its client calls it, or by its first message (the first
    2 KiB of it); "" if it has neither."""
    content, prompt = job.session.encode() if job.session else b"", job.route.prompt
    if not content and prompt is not None and prompt.keys:
        content = prompt.first_content
    tenant = (job.caller.tenant or NOBODY).encode()
    return blake2b(tenant + b"\0" + content, digest_size=16).hexdigest() if content else ""
