"""Chooses a replica for a request: by a placement in the store, or by hashing while the store is away."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

import structlog

from coordinator.errors import NoRoom, OverLimit, StoreError, StoreLate
from coordinator.placement import NOTHING, Placement, PlaceRequest, Reservation
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.store import Store
from coordinator.subset import Subset
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.replicas.fleet import Fleet, ServedModel
from gateway.request.reader import Job
from gateway.routing.backends import PoolRoom, choose_pool
from gateway.routing.local_queue import LocalQueue
from gateway.routing.outcomes import ReplicaOutcomes
from gateway.routing.rate_limits import rate_limited
from gateway.routing.rendezvous import fallback_order, first_usable, rendezvous_order
from gateway.routing.tenants import Tenants
from gateway.routing.ticket import Ticket
from gateway.settings.gateway_settings import GatewaySettings

_log = structlog.get_logger("kvgate.router")

_CACHE_POLICIES = frozenset({"prefix_kv_aware", "consistent_hash"})
_READY_FOR_S, _MOST_READY = 0.1, 256


class Router:
    """Places requests. Remembers the failures that this gateway saw on each replica."""

    def __init__(
        self,
        settings: GatewaySettings,
        store: Store,
        metrics: Metrics,
        fleet: Fleet,
        tenants: Tenants,
    ) -> None:
        self._tenants = tenants
        self._store = store
        self._metrics = metrics
        self._fleet = fleet
        self._settings = settings
        self._knobs: dict[tuple[str, bool], PolicyKnobs] = {}
        self.is_watched = False
        """Whether placements tell what their candidates cost, because somebody watches."""
        self._ids = itertools.count(1)
        self._outcomes: dict[str, ReplicaOutcomes] = {}
        self._local = LocalQueue(store, self._is_suspect)
        self._asking: dict[str, Job] = {}
        """By reservation: the requests that are being placed, or wait."""
        self._ready: dict[frozenset[str], tuple[float, frozenset[str]]] = {}
        """Replicas → when this gateway looked which of them are ready, and these."""

    async def place(self, job: Job, tried: Sequence[str], last: Ticket | None) -> Ticket | None:
        """Chooses a replica and reserves its load; None if all were tried. The same step gives back the load of the
        `last` attempt, which failed. If no replica has room, it waits for one. Raises an ApiError if the request may
        not wait, or has waited too long."""
        asked: set[str] = set()
        """The backends that have no replica left for it."""
        while True:
            waited_s = job.waited_s
            ticket = await self._place_in_pool(job, tried, last, is_first=not asked)
            if ticket is not None:
                return ticket
            if job.waited_s > waited_s:
                asked.clear()  # meanwhile, pools that were asked before may have got a ready replica
            asked.add(job.served.backend)
            job.renew(self._fleet.backends(job.model))
            if not self.aim(job, tried, asked) and not _aim_at_any(job, asked):
                return None

    def aim(self, job: Job, tried: Collection[str] = (), asked: Collection[str] = ()) -> bool:
        """Chooses the pool of a request whose model has several, but none of those that were `asked`. A request stays
        in its pool while that has a ready replica that was not `tried`. If no replica that suits the request is ready,
        others will do: how many tokens it has is only estimated. But after a failure of one that suits it, that failure
        tells its client more than a refusal. Returns whether there is a pool to ask."""
        if job.pinned:
            return False
        now_s = time.monotonic()
        able = [each for each in job.backends if each.takes(job.needed_tokens, job.refusing)] or job.backends
        rooms = {
            each.backend: self._room_of(each.fitting(job.needed_tokens, job.refusing), tried, now_s)
            for each in able
            if each.backend not in asked
        }
        if tried and not asked and (here := rooms.get(job.served.backend)) is not None and here.ready:
            return True
        chosen = choose_pool(rooms, _conversation(job))
        if chosen is None and not tried and job.is_choosy:
            job.needed_tokens, job.refusing = 0, frozenset()
            return self.aim(job)
        if chosen is not None:
            job.aim(next(each for each in job.backends if each.backend == chosen))
        return chosen is not None

    def _room_of(self, served: ServedModel, tried: Collection[str], now_s: float) -> PoolRoom:
        pool = self._store.pool(served.pool)
        ready = self._ready_of(served, pool, now_s)
        has_waiting = pool.state is not None and pool.state.has_waiting
        left, slots = len(ready) - len(ready.intersection(tried)), self._settings.policy.max_active_requests or math.inf
        return PoolRoom(left, len(pool.live) * pool.gateways, has_waiting, slots)

    def _ready_of(self, served: ServedModel, pool: Pool, now_s: float) -> frozenset[str]:
        """Its replicas that get requests, as of a moment ago: to look at a thousand takes a millisecond."""
        at_s, ready = self._ready.get(served.names, (0.0, served.names))
        if now_s - at_s > _READY_FOR_S:
            state = pool.state
            ready = frozenset(
                name
                for name in served.names
                if self._fleet.is_ready(name) and not (state is not None and state.has_open_breaker(name))
            )
            if len(self._ready) >= _MOST_READY:
                self._ready.clear()
            self._ready[served.names] = now_s, ready
        return ready

    async def _place_in_pool(
        self, job: Job, tried: Sequence[str], last: Ticket | None, is_first: bool
    ) -> Ticket | None:
        """`is_first`: no other pool was asked to place this attempt."""
        started = time.perf_counter()
        pool = self.pool(job)
        release, since_ms = "", pool.clock.time_ms(job.held_since_s) if job.held_since_s else 0
        if last is not None:
            since_ms = last.request.standing.since_ms or since_ms
            if is_first and last.pool is pool and not last.is_released:
                release = last.request.reservation
            else:
                _give_back(last)
                last.pool.settlements.send()  # before the next attempt counts
        request = self.request(job, pool, tried, release, since_ms)
        request.is_counted = not release and (last is not None or bool(job.waited_s))  # by another pool
        waited_s = request.waited_s = job.waited_s
        ticket = await self._place_in_store(job, pool, request, last) if request.serving else None
        if ticket is None and job.served.unshared:
            ticket = self._place_unshared(job, pool, request)
        if ticket is not None:
            request = ticket.request
        took_s = time.perf_counter() - started
        if request.waited_s > waited_s:
            took_s -= request.waited_s - waited_s
        self._metrics.placement_s.observe(took_s)
        if ticket is not None:
            self._metrics.decisions.inc(request.knobs.name, ticket.why, ticket.state)
            if request.waited_s:
                self._metrics.queue_wait_s.observe(request.waited_s, self._tenants.bands()[request.standing.band])
        return ticket

    async def _place_in_store(self, job: Job, pool: Pool, request: PlaceRequest, last: Ticket | None) -> Ticket | None:
        """Asks the store. A request that it does not place takes room in this gateway's share, or waits for it; when
        the store is back, it is asked again."""
        try:
            while (placed := await self._place_once(job, pool, request, last)) == "again":
                request = replace(request, reservation=self._new_reservation(), release="")
        except NoRoom as refusal:
            self._metrics.queue_refusals.inc(refusal.reason)
            raise _no_room(refusal, self._settings.queue.wait_s) from None
        except OverLimit as refusal:
            self._metrics.queue_refusals.inc(refusal.limit)
            assert request.limits is not None
            raise rate_limited(refusal, request.limits) from None
        if placed is None:
            job.noted_wait(request.waited_s)
        return placed

    async def _place_once(
        self, job: Job, pool: Pool, request: PlaceRequest, last: Ticket | None
    ) -> Ticket | Literal["again"] | None:
        self._asking[request.reservation] = job
        try:
            if not self._local.would_overtake(pool, request):
                try:
                    placement = await pool.place(request)
                except (NoRoom, OverLimit) as refusal:
                    self._store.note(pool.name, None)
                    if isinstance(refusal, OverLimit):
                        self._local.told(request, refusal.left)
                    raise
                except StoreError as error:
                    self._store.note(pool.name, error)
                    if isinstance(error, StoreLate):
                        self._metrics.store_late.inc(error.cause)
                else:
                    return await self._ticket(job, pool, request, placement)
            if last is not None:
                _give_back(last)
            placed = await self._local.place(pool, request, last is not None)
        finally:
            del self._asking[request.reservation]
        if placed == "none":
            return None
        return "again" if placed == "again" else self._fallback_ticket(job, pool, request, placed)

    async def _ticket(
        self, job: Job, pool: Pool, request: PlaceRequest, placement: Placement | Reservation | None
    ) -> Ticket | None:
        """The ticket of a request that was placed."""
        if isinstance(placement, Reservation):  # by this gateway, while the request waited
            return self._fallback_ticket(job, pool, request, placement)
        self._store.note(pool.name, None)
        if placement is None:
            return None
        if placement.left:
            self._local.told(request, placement.left)
        if placement.replica not in job.served.replicas:  # somebody wrote to the store's orders by hand
            pool.done(request.reservation)
            pool.claims.withdraw(request, placement)
            request.room_share = 0.0  # it does not wait
            placed = await self._local.place(pool, request, is_retry=True)
            return self._fallback_ticket(job, pool, request, placed) if isinstance(placed, Reservation) else None
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
        """The tokens that the engine will serve from its cache. Engines cache whole blocks, and always compute the last
        token of a prompt. If the tokens up to the matched key are only estimated, one more block is left out."""
        keys, tokens = placement.matched_keys, placement.matched_tokens
        if not keys:
            return 0
        block_tokens = self._fleet.block_tokens(placement.replica)
        if placement.matched_kind == "claim" and tokens == request.tokens[keys - 1]:
            tokens -= block_tokens
        if keys == len(request.keys):
            tokens -= 1
        return max(0, tokens - tokens % block_tokens)

    def pool(self, job: Job) -> Pool:
        pool = self._store.pool(job.served.pool)
        self._local.watch(pool)
        return pool

    def replicas_changed(self) -> None:
        """Requests that wait go to the replicas that serve their models now."""
        if self._asking:
            self._local.replicas_changed(self._serving_now)

    def _serving_now(self, request: PlaceRequest) -> Subset | None:
        job = self._asking.get(request.reservation)
        if job is None:
            return None
        backends = self._fleet.backends(job.model)
        same = next((each for each in backends if each.backend == job.served.backend), None)
        if same is None:
            return None
        job.backends = backends
        job.aim(same)
        return job.served.shared

    def leave_dead_pools(self) -> None:
        """Replicas have come, gone or changed. Requests that wait for replicas of which none is ready, or that are not
        listed any more, are placed again if other replicas of their model are ready."""
        self._ready.clear()
        now_s = time.monotonic()
        for reservation, job in list(self._asking.items()):
            backends = () if job.pinned else self._fleet.backends(job.model)
            is_listed = any(each.backend == job.served.backend for each in backends)
            if is_listed and self._has_ready(job.served, now_s):
                continue
            if any(self._has_ready(each, now_s) for each in backends):
                self._store.pool(job.served.pool).seats.send_away(reservation)
                self._local.send_away(reservation)

    def _has_ready(self, served: ServedModel, now_s: float) -> bool:
        return bool(self._ready_of(served, self._store.pool(served.pool), now_s))

    def store_is_up(self) -> None:
        """Placements go through the store again."""
        self._local.store_is_up()

    def _new_reservation(self) -> str:
        return f"{self._store.gateway}-{next(self._ids):x}"

    def request(self, job: Job, pool: Pool, tried: Sequence[str], release: str, since_ms: int = 0) -> PlaceRequest:
        """The question to the store. `since_ms`: it has waited since then, and keeps its place."""
        room_share, standing = self._tenants.of(job.caller.tenant, job.max_output_tokens, since_ms)
        can_wait = job.prompt is not None and job.endpoint.computes_prompt
        limits = None
        if job.method == "POST" and job.endpoint.computes_prompt:
            # Between calls of the server's tools, an engine computes a response's context again.
            has_turns = job.endpoint.stores_responses and job.max_output_tokens is None
            most_tokens = 0 if has_turns else job.choices * job.served.longest_tokens
            limits = self._tenants.limits_of(
                job.caller.tenant, job.max_output_tokens, can_wait, most_tokens, job.prompt_tokens
            )
        order: Sequence[str] = ()
        affinity = _affinity(job)
        if job.policy == "consistent_hash":
            order = fallback_order(pool.records, job.served.shared, job.pinned, affinity)
        return PlaceRequest(
            reservation=self._new_reservation(),
            keys=job.prompt.keys if job.prompt else (),
            tokens=job.tokens,
            answer=job.prompt.answer if job.prompt else (0, 0),
            prompt_tokens=job.prompt_tokens,
            knobs=self.knobs(job.policy, job.is_traced),
            seed=random.getrandbits(31),
            tried=tried,
            serving=job.served.shared,
            release=release,
            pinned=job.pinned,
            order=order,
            may_report=job.endpoint.reports_blocks and not job.is_batch,
            shape=job.prompt.shape() if job.prompt else b"{}",
            is_streamed=job.stream,
            room_share=room_share if can_wait else 0.0,
            standing=standing,
            limits=limits,
            affinity=affinity,
        )

    def knobs(self, policy: str, tells_costs: bool = False) -> PolicyKnobs:
        wanted = policy, tells_costs or self.is_watched
        if wanted not in self._knobs:
            self._knobs[wanted] = replace(knobs_of(self._settings, policy), tells_costs=int(wanted[1]))
        return self._knobs[wanted]

    def _fallback_ticket(self, job: Job, pool: Pool, request: PlaceRequest, placed: Reservation) -> Ticket:
        """The ticket of a request that this gateway placed by itself."""
        replica, url = placed.replica, job.served.replicas[placed.replica]
        is_bounded = self._local.room(pool, request).is_bounded
        return Ticket(pool, request, replica, placed.incarnation, url, "fallback", 0, None, is_bounded)

    def fallback_order(self, job: Job, pool: Pool) -> list[str]:
        """The order in which all gateways try replicas without a store: the ready ones, or all if none is ready."""
        return fallback_order(pool.records, job.served.shared, job.pinned, _affinity(job))

    def _place_unshared(self, job: Job, pool: Pool, request: PlaceRequest) -> Ticket | None:
        """Places a request on a replica whose id means another engine in the store. The store is told nothing of it."""
        order = self.unshared_order(job)
        replica = first_usable(order, [each for each in order if self._is_suspect(each)], request.tried)
        if replica is None:
            return None
        lives, urls = job.served.unshared, job.served.replicas
        return Ticket(pool, request, replica, lives[replica], urls[replica], "fallback", 0, None)

    def unshared_order(self, job: Job) -> list[str]:
        """The replicas whose ids mean other engines in the store, in the order in which gateways try them."""
        if job.pinned:
            return [job.pinned] if job.pinned in job.served.unshared else []
        return rendezvous_order(Subset.of(job.served.unshared), _affinity(job), lambda _: True)

    def _is_suspect(self, replica: str) -> bool:
        """Whether it failed recently for this gateway."""
        outcomes = self._outcomes.get(replica)
        return outcomes is not None and outcomes.is_suspect(time.monotonic())

    def failed(self, ticket: Ticket) -> None:
        """The replica itself failed: reports that to its shared breaker."""
        outcomes, now_s = self._outcomes_of(ticket.replica), time.monotonic()
        unreported = outcomes.failed(now_s)
        ticket.pool.report(ticket.replica, ticket.incarnation, "failure", unreported, outcomes.errs_in_a_row(now_s))

    def erred(self, ticket: Ticket) -> None:
        """The replica answered with an error, or broke the connection. Whose fault that is, is not known yet."""
        self._outcomes_of(ticket.replica).erred(ticket.sent_s, time.monotonic())

    def errs_in_a_row(self, replica: str) -> bool:
        """Whether it answers each request of this gateway with an error, as it did not before."""
        outcomes = self._outcomes.get(replica)
        return outcomes is not None and outcomes.errs_in_a_row(time.monotonic())

    def broke_off(self, ticket: Ticket) -> None:
        """The replica failed in the middle of an answer, which was counted as a success when it began."""
        self._outcomes_of(ticket.replica).broke_off(ticket.sent_s, time.monotonic())
        self.failed(ticket)

    def succeeded(self, ticket: Ticket, is_proof: bool) -> None:
        """The replica answered. If its breaker was open and this request was the probe, the breaker closes. `is_proof`:
        its engine has worked for this request."""
        self._outcomes_of(ticket.replica).succeeded(time.monotonic(), is_proof)
        fleet = ticket.pool.state
        if fleet is not None and fleet.open_until_ms.get(ticket.replica):
            ticket.pool.report(ticket.replica, ticket.incarnation, "success")

    def ended_well(self, ticket: Ticket) -> None:
        """The replica's answer is complete."""
        outcomes = self._outcomes.get(ticket.replica)
        if outcomes is not None:
            outcomes.ended_well(time.monotonic())

    def _outcomes_of(self, replica: str) -> ReplicaOutcomes:
        outcomes = self._outcomes.get(replica)
        if outcomes is None:
            now = time.monotonic()
            self._outcomes = {name: each for name, each in self._outcomes.items() if not each.are_over(now)}
            outcomes = self._outcomes[replica] = ReplicaOutcomes()
        return outcomes


def _give_back(last: Ticket) -> None:
    """What a failed attempt had reserved of its tenant's limits is the next one's."""
    last.used = NOTHING
    last.done()


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


def _no_room(refusal: NoRoom, wait_s: float) -> ApiError:
    """The answer to a request that found no room."""
    expected_s = max(1, math.ceil(refusal.expected_s))
    headers = {"retry-after": str(expected_s)}
    if refusal.reason in ("full", "full_tenant"):
        whose = "of yours " if refusal.reason == "full_tenant" else ""
        message = f"Too many requests {whose}wait already. Retry in {expected_s} s."
        return ApiError(429, "queue_full", message, headers=headers)
    if refusal.reason == "unreachable":
        message = f"No replica has room. The wait would be about {expected_s} s; requests wait {wait_s:g} s at most."
    else:
        message = f"No replica had room within {wait_s:g} s. Retry in about {expected_s} s."
    return ApiError(503, "deadline_unreachable", message, headers=headers)


def _aim_at_any(job: Job, asked: Collection[str]) -> bool:
    """No pool has a ready replica as far as this gateway knows. But its heartbeats are up to half a second old, and the
    store may know one. So pools that were not asked are asked, too. Returns whether there is one."""
    left = () if job.pinned else [each for each in job.backends if each.backend not in asked]
    if left:
        job.aim(left[0])
    return bool(left)


def _conversation(job: Job) -> bytes:
    """The bytes by which a conversation stays with its pool. Random if its prompt was not read, or if its policy does
    not look at caches."""
    if job.prompt is None or not job.prompt.keys or job.policy not in _CACHE_POLICIES:
        return random.randbytes(8)
    return job.prompt.first_content


def _affinity(job: Job) -> bytes:
    """The bytes that rendezvous hashing hashes. Without a prompt they are random, so the request may go anywhere."""
    return job.prompt.affinity if job.prompt is not None and job.prompt.keys else random.randbytes(8)
