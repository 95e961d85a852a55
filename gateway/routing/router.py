"""Where a request goes: one placement in the store, or the rule that all gateways share while it is away."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from coordinator.errors import StoreError
from coordinator.pool.pool import PlaceRequest, Pool, Reservation
from coordinator.scripts import BreakerKnobs, Placement, PolicyKnobs
from coordinator.store import Store
from gateway.metrics.gateway_metrics import Metrics
from gateway.replicas.fleet import ready_records
from gateway.request.job import Job
from gateway.routing.outcomes import Outcomes
from gateway.routing.rendezvous import first_usable, rendezvous_order
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.limit_settings import HealthSettings

_log = structlog.get_logger("kvgate.router")


REPORT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Where vLLM takes `vllm_xargs`, by which it is asked to report the blocks that it reuses."""


@dataclass(slots=True)
class Ticket:
    """One attempt of one request: where it goes, why, and the reservation that goes with it."""

    pool: Pool
    request: PlaceRequest
    replica: str
    incarnation: str
    url: str
    why: str
    matched_tokens: int
    """How many tokens of the prompt its engine is predicted to serve from its cache, in whole blocks."""
    placement: Placement | None
    """None when the store did not decide."""
    computed: bool = False
    """Whether the replica has computed the prompt, as far as its answer tells: what it claimed is then true."""

    @property
    def state(self) -> str:
        """exact: an agent tells what the replica holds; degraded: its ownership is claims, which nothing confirms;
        fallback: the store did not decide."""
        if self.placement is None:
            return "fallback"
        return "exact" if self.placement.is_exact else "degraded"

    @property
    def boundary_tokens(self) -> int:
        """Where the chain's next key after the matched one ends, about: no more than that can be cached unknown. The
        text there is taken to be like that before it, of which the engine may have told how many tokens it has."""
        tokens, placed = self.request.tokens, self.placement
        if placed is None:
            return tokens[0] if tokens else 0
        found = (placed.matched_keys, placed.matched_tokens), (placed.stored_keys, placed.stored_tokens)
        matched, matched_tokens = max(found, key=lambda each: each[1])
        if matched == 0:
            return tokens[0] if tokens else 0
        if matched >= len(tokens):
            return max(matched_tokens, self.request.prompt_tokens)
        behind = tokens[matched - 1]
        density = max(1.0, matched_tokens / behind) if behind else 1.0
        return matched_tokens + round(density * (tokens[matched] - behind))

    @property
    def decision(self) -> str:
        """The receipt in x-kvgate-decision."""
        stored = self.placement.stored_tokens if self.placement is not None else 0
        beyond = f"; stored_tokens={stored}" if stored else ""
        return f"{self.why}; policy={self.request.knobs.name}; state={self.state}{beyond}"


class Router:
    """Places requests, and keeps what this gateway alone has seen of replicas that fail."""

    def __init__(
        self, settings: GatewaySettings, store: Store, metrics: Metrics, block_tokens: Callable[[str], int]
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._block_tokens = block_tokens
        self._settings = settings
        self._knobs: dict[str, PolicyKnobs] = {}
        self._ids = itertools.count(1)
        self._breaker = breaker_knobs(settings.health)
        self._outcomes: dict[str, Outcomes] = {}

    async def place(self, job: Job, tried: Sequence[str], release: str) -> Ticket | None:
        """Choose a replica and reserve its load; None when all were tried. `release` is the failed attempt's id."""
        started = time.perf_counter()
        pool = self.pool(job)
        request = self.request(job, pool, tried, release)
        ticket = await self._place_in_store(job, pool, request) if request.serving else None
        if ticket is None and job.served.apart:
            ticket = self._place_apart(job, pool, request)
        self._metrics.placement_s.observe(time.perf_counter() - started)
        if ticket is not None:
            self._metrics.decisions.inc(request.knobs.name, ticket.why, ticket.state)
        return ticket

    async def _place_in_store(self, job: Job, pool: Pool, request: PlaceRequest) -> Ticket | None:
        try:
            placement = await pool.place(request)
        except StoreError as error:
            self._store.note(pool.name, error)
            if request.release:
                pool.done(request.release)
            return self._fall_back(job, pool, request)
        self._store.note(pool.name, None)
        if placement is None:
            return None
        if placement.passed_over_tokens:
            self._metrics.passed_over_tokens.inc(placement.replica, by=placement.passed_over_tokens)
        return Ticket(
            pool,
            request,
            placement.replica,
            placement.incarnation,
            job.served.replicas[placement.replica],
            placement.why,
            self._predicted_tokens(request, placement),
            placement,
        )

    def _predicted_tokens(self, request: PlaceRequest, placement: Placement) -> int:
        """Engines serve whole blocks from cache, and compute a prompt's last token in any case. Where the tokens behind
        the matched key are this gateway's estimate, one block more is left out."""
        keys, tokens = placement.matched_keys, placement.matched_tokens
        if not keys:
            return 0
        block_tokens = self._block_tokens(placement.replica)
        if placement.matched_kind == "claim" and tokens == request.tokens[keys - 1]:
            tokens -= block_tokens
        if keys == len(request.keys):
            tokens -= 1
        return max(0, tokens - tokens % block_tokens)

    def pool(self, job: Job) -> Pool:
        return self._store.pool(job.served.pool)

    def request(self, job: Job, pool: Pool, tried: Sequence[str], release: str) -> PlaceRequest:
        """What the store is asked."""
        order: Sequence[str] = ()
        if job.policy == "consistent_hash":
            order = rendezvous_order(pool.records, _affinity(job))
        return PlaceRequest(
            reservation=f"{self._store.gateway}-{next(self._ids):x}",
            keys=job.prompt.keys if job.prompt else (),
            tokens=job.tokens,
            prompt_tokens=job.prompt_tokens,
            knobs=self.knobs(job.policy),
            seed=random.getrandbits(31),
            tried=tried,
            serving=job.served.shared,
            release=release,
            pinned=job.pinned,
            order=order,
            may_report=job.path in REPORT_PATHS and not job.is_batch,
            shape=job.prompt.shape() if job.prompt else b"{}",
            is_streamed=job.stream,
        )

    def knobs(self, policy: str) -> PolicyKnobs:
        if policy not in self._knobs:
            self._knobs[policy] = knobs_of(self._settings, policy)
        return self._knobs[policy]

    def _fall_back(self, job: Job, pool: Pool, request: PlaceRequest) -> Ticket | None:
        """The rule without a store: rendezvous hashing over the last known replicas."""
        replica = first_usable(self.fallback_order(job, pool), self._avoided(pool), request.tried)
        if replica is None:
            return None
        incarnation = pool.records[replica].incarnation
        where = (replica, incarnation, request.prompt_tokens)
        pool.adopt(Reservation(request.reservation, *where, request.tip, request.is_streamed))
        return Ticket(pool, request, replica, incarnation, job.served.replicas[replica], "fallback", 0, None)

    def fallback_order(self, job: Job, pool: Pool) -> list[str]:
        """The replicas as all gateways would try them without a store: those ready, or, when none is, all."""
        shared = job.served.shared
        serving = [record for record in pool.records.values() if record.replica in shared]
        if job.pinned:
            return [record.replica for record in serving if record.replica == job.pinned]
        return rendezvous_order((record.replica for record in ready_records(serving)), _affinity(job))

    def _place_apart(self, job: Job, pool: Pool, request: PlaceRequest) -> Ticket | None:
        """Where all others were tried, one whose id is another engine's in the store, which is told nothing of this."""
        replica = first_usable(self.order_apart(job), self._avoided(pool), request.tried)
        if replica is None:
            return None
        lives, urls = job.served.apart, job.served.replicas
        return Ticket(pool, request, replica, lives[replica], urls[replica], "fallback", 0, None)

    def order_apart(self, job: Job) -> list[str]:
        """The replicas whose ids are others' in the store, as all gateways that reach them would try them."""
        if job.pinned:
            return [job.pinned] if job.pinned in job.served.apart else []
        return rendezvous_order(job.served.apart, _affinity(job))

    def _avoided(self, pool: Pool) -> list[str]:
        """Replicas that failed this gateway just now, or carry all that it may give them."""
        now = time.monotonic()
        avoided = [replica for replica, outcomes in self._outcomes.items() if outcomes.is_suspect(now)]
        cap = self._settings.policy.max_active_requests
        if cap:
            active: dict[str, int] = {}
            for one in pool.live.values():
                active[one.replica] = active.get(one.replica, 0) + 1
            avoided += [replica for replica, count in active.items() if count >= cap]
        return avoided

    def failed(self, ticket: Ticket) -> None:
        """The replica itself failed: tell everyone."""
        untold = self._outcomes_of(ticket.replica).failed(time.monotonic())
        ticket.pool.report(ticket.replica, ticket.incarnation, "failure", self._breaker, untold)

    def broke_off(self, ticket: Ticket) -> None:
        """The replica failed in the middle of an answer, whose beginning was taken for a success."""
        self._outcomes_of(ticket.replica).broke_off(time.monotonic())
        self.failed(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Nothing was computed for this attempt: take its claims back."""
        if ticket.placement is not None:
            ticket.pool.withdraw(ticket.request, ticket.placement)

    def succeeded(self, ticket: Ticket) -> None:
        """The replica answered: where its breaker is open and this was the probe, it closes for everyone."""
        self._outcomes_of(ticket.replica).succeeded(time.monotonic())
        fleet = ticket.pool.state
        if fleet is not None and fleet.open_until_ms.get(ticket.replica):
            ticket.pool.report(ticket.replica, ticket.incarnation, "success", self._breaker)

    def _outcomes_of(self, replica: str) -> Outcomes:
        outcomes = self._outcomes.get(replica)
        if outcomes is None:
            now = time.monotonic()
            self._outcomes = {name: each for name, each in self._outcomes.items() if not each.are_over(now)}
            outcomes = self._outcomes[replica] = Outcomes(self._breaker)
        return outcomes


def breaker_knobs(health: HealthSettings) -> BreakerKnobs:
    """When a replica's breaker opens, as configured."""
    return BreakerKnobs(
        health.breaker_failures,
        health.breaker_error_rate,
        int(health.breaker_window_s * 1000),
        int(health.breaker_open_s * 1000),
    )


def knobs_of(settings: GatewaySettings, policy: str) -> PolicyKnobs:
    """The cost expression's numbers, for one policy."""
    chosen = settings.policy
    return PolicyKnobs(
        name=policy,
        min_slack_requests=chosen.min_slack_requests,
        load_factor=chosen.load_factor,
        request_cost_tokens=chosen.request_cost_tokens,
        copy_weight=chosen.copy_weight,
        max_owners=chosen.max_owners,
        max_active_requests=chosen.max_active_requests or 0,
        cpu_credit=chosen.cpu_credit,
        store_credit=chosen.store_credit,
        probe_ms=int(settings.health.breaker_open_s * 1000),
    )


def _affinity(job: Job) -> bytes:
    """What rendezvous hashing goes by; a request without a prompt has none, and goes anywhere."""
    return job.prompt.affinity if job.prompt is not None and job.prompt.keys else random.randbytes(8)
