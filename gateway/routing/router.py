"""Chooses a replica for a request: by a placement in the store, or by hashing while the store is away."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from coordinator.errors import NoRoom, OverBudget, OverLimit, Refused, StoreError, StoreLate
from coordinator.placement import NOTHING, Placement, PlaceRequest, Reservation
from coordinator.pool.pool import Pool
from coordinator.pool.seats import AGAIN
from coordinator.store import Store
from coordinator.subset import Subset
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.replicas.fleet import Fleet
from gateway.request.job import Job
from gateway.routing.budget_answers import budget_refused
from gateway.routing.failures import ReplicaFailures
from gateway.routing.holds import Holds
from gateway.routing.local_queue import LocalQueue
from gateway.routing.pool_choice import PoolChoice, aim_at_any
from gateway.routing.questions import Question, Questions, affinity_of, why_unpaired
from gateway.routing.rate_limits import rate_limited
from gateway.routing.rendezvous import fallback_order, first_usable, rendezvous_order
from gateway.routing.tenants import NOBODY, Tenants
from gateway.routing.ticket import Ticket
from gateway.routing.weighted import Weighted
from gateway.settings.gateway_settings import GatewaySettings

NO_ROOM_IN_TIME = "deadline_unreachable"
"""The code of the error for a request that finds no room in time."""
_Placed = Placement | Reservation | Literal["away", "again"] | None
"""`away`: the store gives no answer that can be used; `again`: the request is to be asked again."""


class Router:
    """Places the requests of one gateway."""

    def __init__(
        self,
        settings: GatewaySettings,
        store: Store,
        metrics: Metrics,
        fleet: Fleet,
        tenants: Tenants,
        holds: Holds,
    ) -> None:
        self._store = store
        self._holds = holds
        self._metrics = metrics
        self._fleet = fleet
        self._settings = settings
        self._tenants = tenants
        self.questions = Questions(settings, store.gateway, tenants)
        self.choice = PoolChoice(settings.policy.max_active_requests or 0, store, fleet)
        self.failures = ReplicaFailures()
        self._local = LocalQueue(store, self.failures.is_suspect)
        self._weighted = Weighted(
            settings.redis.namespace, store, self.choice, self.questions, self._local, self._no_answer
        )
        self._asking: dict[str, Job] = {}
        """By reservation: the requests that are being placed, or wait."""

    async def place(
        self,
        job: Job,
        tried: Sequence[str],
        avoided_now: Callable[[], Sequence[str]],
        last: Ticket | None,
        *,
        is_new: bool,
    ) -> Ticket | None:
        """Chooses a replica and reserves its load; None if all were tried. `avoided_now` tells which replicas are not
        asked: those `tried`, and others. The same step gives back the load of the `last` attempt, which failed. A
        request waits for room. Before that, if it `is_new`, it waits until this gateway knows a replica that is ready.
        Raises an ApiError if the request may not wait, or has waited too long."""
        if is_new:
            await self._holds.until_ready(job)
        route, asked = job.route, set[str]()
        """The backends that have no replica left for it."""
        if route.has_choice:
            self.choice.aim(job, tried)
        avoided = avoided_now()
        while True:
            waited_s = route.waited_s
            ticket = await self._in_pool(job, avoided, last, is_first=not asked)
            if ticket is not None:
                return ticket
            if route.waited_s > waited_s:
                asked.clear()  # meanwhile, pools that were asked before may have got a ready replica
            asked.add(route.served.backend)
            route.renew(self._fleet)
            if self.choice.aim(job, avoided, asked) or aim_at_any(job, asked):
                continue
            if last is not None:
                last.is_released = True
            if tried or not self._holds.may_hold(job):
                return None
            await self._holds.until_ready(job, was_refused=True)  # the last replica was drained or lost just now
            asked.clear()
            if route.has_choice:
                self.choice.aim(job)
            avoided = avoided_now()

    async def is_held(self, job: Job, most_s: float) -> bool:
        """A request that was tried everywhere waits for news of its replicas, for so long at most. False if it may
        not. Raises an ApiError if it has waited too long."""
        if not self._holds.may_hold(job):
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._holds.until_ready(job, was_refused=True)
        return True

    async def _in_pool(self, job: Job, avoided: Sequence[str], last: Ticket | None, *, is_first: bool) -> Ticket | None:
        """Asks the store for a place in the pool that the request is aimed at; None if no replica is left there. While
        the store gives no answer, the request takes room in this gateway's share, or waits for it. It is asked again
        when the store is back, and when its limits have changed. `is_first`: no other pool was asked for this
        attempt."""
        began_s, waited_s = time.perf_counter(), job.route.waited_s
        pool, request, answer = await self._question(job, avoided, last, is_first=is_first)
        placed: Placement | Reservation | None = None
        try:
            while request.serving:
                self._asking[request.reservation] = job
                try:
                    is_away = self._local.would_overtake(pool, request) if answer == "ask" else answer == "away"
                    told = "away" if is_away else self._usable(job, pool, request, await pool.place(request, answer))
                except StoreError as error:
                    told = self._no_answer(pool.name, error)
                except Refused as refusal:
                    self._heard(pool, request, refusal)
                    raise
                if told == "away":
                    if last is not None:
                        _give_back(last)
                    told = await self._local.place(pool, request, last is not None or request.is_counted)
                if not isinstance(told, str):
                    placed = told
                    break
                del self._asking[request.reservation]
                request, answer = self.questions.again(request, job, pool), "ask"
        except Refused as refusal:
            raise self._refused(job, request, refusal) from None
        finally:
            self._asking.pop(request.reservation, None)
            answer = None  # it may be the refusal: see Placer.place
        ticket = self._ticket(job, pool, request, placed) or self._place_unshared(job, pool, request)
        if ticket is not None:
            job.route.chose(job.route.served.option)
            ticket.why_unpaired = self._why_unpaired(job, ticket)
        self._observe(request, ticket, time.perf_counter() - began_s - max(0.0, request.waited_s - waited_s))
        return ticket

    async def _question(self, job: Job, avoided: Sequence[str], last: Ticket | None, *, is_first: bool) -> Question:
        """What the store is asked, or has been asked if it had to choose among several backends."""
        pool, route = self.pool(job), job.route
        release, since_ms = "", pool.clock.time_ms(route.held_since_s) if route.held_since_s else 0
        if last is not None:
            since_ms = last.request.standing.since_ms or since_ms
            if is_first and last.pool is pool and not last.is_released:
                release = last.request.reservation
            else:
                _give_back(last)
                last.pool.settlements.send()  # before the next attempt counts
        elif route.offer and not avoided and (first := await self._weighted.first(job, since_ms)) is not None:
            return first
        request = self.questions.ask(job, pool, avoided, release, since_ms)
        request.has_waited(route.waited_s)
        if not release and (last is not None or route.waited_s):
            request.has_counted()  # by another pool
        return Question(pool, request, "ask")

    def _usable(
        self, job: Job, pool: Pool, request: PlaceRequest, placed: Placement | Reservation | Literal["again"] | None
    ) -> _Placed:
        """The store's answer; `away` if it chose a replica that has left."""
        if placed == "again" or isinstance(placed, Reservation):  # by this gateway, while the request waited
            return placed
        self._store.note(pool.name, None)
        if placed is None or placed.replica in job.route.served.replicas:
            return placed
        pool.done(request.reservation)  # or somebody wrote to the store's orders by hand
        pool.claims.withdraw(request, placed)
        if placed.prefill is not None:
            pool.placer.undo(request.of_prefill(), placed.prefill)
        request.must_not_wait()
        request.has_counted()
        return "away"

    def _heard(self, pool: Pool, request: PlaceRequest, refusal: Refused) -> None:
        """The store has refused it."""
        self._store.note(pool.name, None)
        if isinstance(refusal, OverLimit):
            self._local.told(request, refusal.left)

    def _no_answer(self, pool: str, error: StoreError) -> Literal["away"]:
        """The store gave no answer that can be used."""
        self._store.note(pool, error)
        if isinstance(error, StoreLate):
            self._metrics.store_late.inc(error.cause)
        return "away"

    def _observe(self, request: PlaceRequest, ticket: Ticket | None, took_s: float) -> None:
        """Counts a placement, which took so long besides waiting for room."""
        self._metrics.placement_s.observe(took_s)
        if ticket is not None:
            self._metrics.decisions.inc(request.knobs.name, ticket.why, ticket.state)
            if ticket.why_unpaired:
                self._metrics.unpaired.inc(ticket.why_unpaired)
            if request.waited_s:
                self._metrics.queue_wait_s.observe(request.waited_s, self._tenants.bands()[request.standing.band])

    def _why_unpaired(self, job: Job, ticket: Ticket) -> str:
        """See Ticket.why_unpaired."""
        if not job.route.served.prefills or ticket.prefill is not None:
            return ""
        if ticket.placement is None:
            return "fallback"
        asked = ticket.request.prefill is not None
        return (ticket.placement.unpaired or "none") if asked else why_unpaired(job)

    async def place_beside(
        self, job: Job, first: Ticket, tried: Sequence[str], max_share: float, most_tokens: int
    ) -> Ticket:
        """A place for a second attempt beside the first one: see relay/hedges.py. Raises StoreError, NoRoom, OverLimit
        or OverBudget if there is none now."""
        request = self.questions.beside(first.request, tried, max_share, most_tokens)
        placement = await first.pool.place(request)
        if not isinstance(placement, Placement):
            raise NoRoom("no_room", 0)
        if placement.replica not in job.route.served.replicas:  # somebody wrote to the store's orders by hand
            first.pool.done(request.reservation, NOTHING)
            first.pool.claims.withdraw(request, placement)
            raise NoRoom("no_room", 0)
        ticket = self._placed_ticket(job, first.pool, request, placement)
        ticket.other_name, ticket.why_unpaired = job.other_name, first.why_unpaired
        return ticket

    def _ticket(
        self, job: Job, pool: Pool, request: PlaceRequest, placement: Placement | Reservation | None
    ) -> Ticket | None:
        """The ticket of a request that was placed; None if no replica is left."""
        if placement is None:
            job.route.noted_wait(request.waited_s)
            return None
        if isinstance(placement, Reservation):  # by this gateway
            url, is_bounded = job.route.served.replicas[placement.replica], self._local.room(pool, request).is_bounded
            return Ticket(pool, request, placement.replica, placement.incarnation, url, "fallback", 0, None, is_bounded)
        return self._placed_ticket(job, pool, request, placement)

    def _placed_ticket(self, job: Job, pool: Pool, request: PlaceRequest, placement: Placement) -> Ticket:
        """The ticket of a request that the store has placed."""
        if placement.left:
            self._local.told(request, placement.left)
        if placement.passed_over_tokens:
            self._metrics.passed_over_tokens.inc(placement.replica, by=placement.passed_over_tokens)
        ticket = self._ticket_of(pool, request, placement, job.route.served.replicas[placement.replica])
        if placement.prefill is not None:
            leg = self._ticket_of(pool, request.of_prefill(), placement.prefill, "")
            leg.url = job.route.served.prefills.get(leg.replica, "")
            if leg.url:
                ticket.prefill = leg
            else:  # somebody wrote to the store by hand
                leg.ended()
                leg.done()
                ticket.computes_itself()
        return ticket

    def _ticket_of(self, pool: Pool, request: PlaceRequest, placement: Placement, url: str) -> Ticket:
        replica, life = placement.replica, placement.incarnation
        predicted_tokens = self._predicted_tokens(request, placement)
        return Ticket(pool, request, replica, life, url, placement.why, predicted_tokens, placement)

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
        pool = self._store.pool(job.route.served.pool)
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
        route = job.route
        backends = route.backends_of(self._fleet)
        same = next((each for each in backends if each.backend == route.served.backend), None)
        if same is None:
            return None
        route.backends_changed(backends, self._fleet)
        route.aim(same)
        return route.served.shared

    def use(self, settings: GatewaySettings) -> None:
        """Placements follow these settings from now on. Requests that wait and are concerned are asked again, and keep
        their places."""
        before, self._settings = self._settings, settings
        self._tenants.use(settings)
        self.questions.use(settings)
        self.choice.use(settings.policy.max_active_requests or 0)
        everybody = [(told.policy, told.queue, told.billing) for told in (before, settings)]
        old, new = ({each.name: each for each in told.tenants} for told in (before, settings))
        old_keys, new_keys = (
            {each.name: (each.limits, each.budgets) for each in told.security.api_keys} for told in (before, settings)
        )
        for reservation, job in list(self._asking.items()):
            name, key = job.caller.tenant or NOBODY, job.caller.id
            if everybody[0] != everybody[1] or old.get(name) != new.get(name) or old_keys.get(key) != new_keys.get(key):
                self._store.pool(job.route.served.pool).seats.send_away(reservation, AGAIN)
                self._local.ask_again(reservation)

    def leave_dead_pools(self) -> None:
        """Replicas have come, gone or changed. Requests that wait for replicas of which none is ready, or that are not
        listed any more, are placed again if other replicas of their model are ready."""
        self.choice.forget()
        now_s = time.monotonic()
        for reservation, job in list(self._asking.items()):
            route = job.route
            backends = () if route.pinned else route.backends_of(self._fleet)
            is_listed = any(each.backend == route.served.backend for each in backends)
            if is_listed and self.choice.has_ready(route.served, now_s):
                continue
            if any(self.choice.has_ready(each, now_s) for each in backends):
                self._store.pool(route.served.pool).seats.send_away(reservation)
                self._local.send_away(reservation)

    def _refused(self, job: Job, request: PlaceRequest, refusal: Refused) -> ApiError:
        if isinstance(refusal, NoRoom):
            self._metrics.queue_refusals.inc(refusal.reason)
            job.route.noted_wait(request.waited_s)  # another model may answer it, and it has paid for a request
            return _no_room(refusal, self._settings.queue.wait_s)
        if isinstance(refusal, OverBudget):
            now_s = job.route.billed_at_s + request.waited_s  # the window in which it came may be over
            error = budget_refused(refusal, now_s, self._settings.billing.currency)
            self._metrics.queue_refusals.inc(error.code)
            return error
        assert isinstance(refusal, OverLimit)
        assert request.limits is not None
        self._metrics.queue_refusals.inc(refusal.limit)
        return rate_limited(refusal, request.limits)

    def store_is_up(self) -> None:
        """Placements go through the store again."""
        self._local.store_is_up()

    def fallback_order(self, job: Job, pool: Pool) -> list[str]:
        """The order in which all gateways try replicas without a store: the ready ones, or all if none is ready."""
        return fallback_order(pool.records, job.route.served.shared, job.route.pinned, affinity_of(job))

    def _place_unshared(self, job: Job, pool: Pool, request: PlaceRequest) -> Ticket | None:
        """Places a request on a replica whose id means another engine in the store. The store is told only what it
        takes of budgets. None if there is none left. Raises ApiError."""
        if not job.route.served.unshared:
            return None
        order = self.unshared_order(job)
        replica = first_usable(order, [each for each in order if self.failures.is_suspect(each)], request.tried)
        if replica is None:
            return None
        lives, urls = job.route.served.unshared, job.route.served.replicas
        if request.bill is not None:
            if (over := self._local.over_budget(pool, request)) is not None:
                raise self._refused(job, request, over)
            pool.adopt(
                Reservation(
                    request.reservation,
                    replica,
                    lives[replica],
                    0,
                    request.tip,
                    bill=request.bill,
                    uncached_tokens=request.prompt_tokens,
                )
            )
        return Ticket(pool, request, replica, lives[replica], urls[replica], "fallback", 0, None)

    def unshared_order(self, job: Job) -> list[str]:
        """The replicas whose ids mean other engines in the store, in the order in which gateways try them."""
        if job.route.pinned:
            return [job.route.pinned] if job.route.pinned in job.route.served.unshared else []
        return rendezvous_order(Subset.of(job.route.served.unshared), affinity_of(job), lambda _: True)


def _give_back(last: Ticket) -> None:
    """What a failed attempt had reserved of limits is the next one's."""
    last.used = NOTHING
    last.done()


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
