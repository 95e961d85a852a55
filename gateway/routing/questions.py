"""Makes the question that a placement asks the store."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from coordinator.accounts import Limits
from coordinator.placement import Answer, PlaceRequest, Prefill, Standing
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.pool.redis_clock import RedisClock
from coordinator.spending import Bill
from gateway.request.job import Job
from gateway.routing.bills import Bills
from gateway.routing.rendezvous import fallback_order
from gateway.routing.tenants import Tenants
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.policies import DEFAULT_POLICY

_PAIRED: Final = ("chat", "completion", "message")
"""Prompts of APIs in which vLLM hands KV caches over."""


class Question(NamedTuple):
    """How a pool is asked to place a request."""

    pool: Pool
    request: PlaceRequest
    answer: Answer | str | None
    """`ask`; or what the store has answered already; `away` if it gave no answer in time."""


class Questions:
    """Those of one gateway, named `gateway` in the store."""

    def __init__(self, settings: GatewaySettings, gateway: str, tenants: Tenants) -> None:
        self._gateway, self._tenants = gateway, tenants
        self._bills = Bills(settings, tenants)
        self.use(settings)
        self.is_watched = False
        """Whether all placements tell what their candidates cost, because somebody watches."""
        self._ids = itertools.count(1)

    def use(self, settings: GatewaySettings) -> None:
        """Placements follow these settings from now on."""
        self._settings = settings
        self._cost_share = settings.decisions.cost_share if settings.decisions.max_bytes else 0.0
        self._bills.use(settings)
        self._least_missing_tokens = settings.pairs.min_tokens
        self._knobs: dict[tuple[str, bool], PolicyKnobs] = {}

    def new_reservation(self) -> str:
        """A name that no other reservation has."""
        return f"{self._gateway}-{next(self._ids):x}"

    def ask(self, job: Job, pool: Pool, tried: Sequence[str], release: str, since_ms: int = 0) -> PlaceRequest:
        """The question to the store. `since_ms`: it has waited since then, and keeps its place."""
        route = job.route
        if route.served.decode_only and why_unpaired(job):
            route.pairs_no_more()
        room_share, standing, limits, bill = self._of_tenant(job, pool.clock, since_ms)
        order: Sequence[str] = ()
        affinity = affinity_of(job)
        if job.policy == "consistent_hash":
            order = fallback_order(pool.records, route.served.shared, route.pinned, affinity)
        return PlaceRequest(
            reservation=self.new_reservation(),
            keys=route.prompt.keys if route.prompt else (),
            tokens=route.tokens,
            answer=route.prompt.answer if route.prompt else (0, 0),
            prompt_tokens=job.prompt_tokens,
            knobs=self.knobs(job.policy, job.is_traced),
            seed=random.getrandbits(31),
            tried=tried,
            serving=route.served.shared,
            release=release,
            pinned=route.pinned,
            order=order,
            may_report=job.endpoint.reports_blocks and not job.is_batch,
            shape=route.prompt.shape() if route.prompt else b"{}",
            is_streamed=job.stream,
            room_share=room_share,
            standing=standing,
            limits=limits,
            bill=bill,
            prefill=self._prefill(job),
            affinity=affinity,
        )

    def _prefill(self, job: Job) -> Prefill | None:
        """Where its prompt may be computed for it. Each choice and each prompt would ask for the KV cache by itself,
        and a reference to that is good once. Of a prompt that is to be computed as a whole, none is there."""
        served = job.route.served
        if not served.prefills or why_unpaired(job):
            return None
        return Prefill(
            served.prefilling, self._least_missing_tokens, tuple(served.prefill_themselves), tuple(served.decode_only)
        )

    def again(self, request: PlaceRequest, job: Job, pool: Pool) -> PlaceRequest:
        """The same question, under another reservation, with what its tenant and the settings say now. It keeps its
        place."""
        room_share, standing, limits, bill = self._of_tenant(job, pool.clock, request.standing.since_ms)
        return replace(
            request,
            reservation=self.new_reservation(),
            release="",
            knobs=self.knobs(job.policy, job.is_traced),
            room_share=room_share if request.room_share else 0.0,
            standing=standing,
            limits=limits,
            bill=bill,
        )

    def beside(self, first: PlaceRequest, tried: Sequence[str], max_share: float, most_tokens: int) -> PlaceRequest:
        """The same question, of a second attempt beside the first one: see PlaceRequest.hedge. Limits do not count it
        as a request, but both attempts have to fit into the limits and budgets of its accounts."""
        return replace(
            first,
            reservation=self.new_reservation(),
            seed=random.getrandbits(31),
            tried=tried,
            release="",
            hedge=(max_share, most_tokens),
            prefill=None,
            waited_s=0.0,
            covered_ms=0,
            is_counted=True,
        )

    def _of_tenant(
        self, job: Job, clock: RedisClock, since_ms: int
    ) -> tuple[float, Standing, Limits | None, Bill | None]:
        """The room that the request may use, its standing, its limits, and what it can cost."""
        room_share, standing = self._tenants.of(job.caller.tenant, job.max_output_tokens, since_ms, job.priority)
        can_wait = job.route.prompt is not None and job.endpoint.computes_prompt
        limits = bill = None
        if job.method == "POST" and job.endpoint.computes_prompt:
            # Between calls of the server's tools, an engine computes a response's context again.
            has_turns = job.endpoint.stores_responses and job.max_output_tokens is None
            most_tokens = 0 if has_turns else job.choices * job.route.served.longest_tokens
            limits = self._tenants.limits_of(
                job.caller, job.max_output_tokens, can_wait, most_tokens, job.prompt_tokens
            )
            bill = self._bills.of(job, clock, most_tokens)
        return room_share if can_wait else 0.0, standing, limits, bill

    def knobs(self, policy: str, tells_costs: bool = False) -> PolicyKnobs:
        """The settings of a policy. `tells_costs`: the answer is to say what the candidates cost, as
        it does for a part of requests."""
        wanted = policy, tells_costs or self.is_watched or random.random() < self._cost_share
        if wanted not in self._knobs:
            self._knobs[wanted] = replace(knobs_of(self._settings, policy), tells_costs=int(wanted[1]))
        return self._knobs[wanted]


def why_unpaired(job: Job) -> str:
    """Why no replica may compute its prompt for another one: a field of its body, `api`, `policy`, `pinned`, `no_chain`
    (nobody knows what replicas hold of it), or `failed` (that was tried in vain); empty if one may."""
    route = job.route
    if job.endpoint.prompt not in _PAIRED or route.prompt is None:
        return "api"
    if route.served.decode_only and job.endpoint.api == "anthropic":
        return "api"  # servers that change their role take no messages
    may_not = {
        "pinned": bool(route.pinned),
        "policy": job.policy != DEFAULT_POLICY,
        "prompt": job.is_batch,
        "use_beam_search": job.not_resumed == "use_beam_search",
        "n": job.choices != 1,
        "prompt_logprobs": not job.reads_cache,
        "failed": not route.may_pair,
        "no_chain": not route.prompt.keys and not route.served.decode_only,
    }
    return next((why for why, is_so in may_not.items() if is_so), "")


def knobs_of(settings: GatewaySettings, policy: str) -> PolicyKnobs:
    """The settings of one policy, as scripts take them."""
    queue = settings.queue
    return PolicyKnobs(
        name=policy,
        max_active_requests=settings.policy.max_active_requests or 0,
        max_wait_s=queue.max_wait_s,
        prefill_tokens_per_s=queue.prefill_tokens_per_s,
        max_waiting=queue.max_waiting,
        max_waiting_per_tenant=queue.max_waiting_per_tenant,
    )


def affinity_of(job: Job) -> bytes:
    """The bytes that rendezvous hashing hashes. Without a prompt they are random, so the request may go anywhere."""
    prompt = job.route.prompt
    return prompt.affinity if prompt is not None and prompt.keys else random.randbytes(8)
