"""Places requests while the store is away, and lets those wait that find no room in this gateway's share.

    place        a request that the store did not place: it takes room, or waits here
    on_away      seats of a store that is away for longer than a moment: their requests may take room here, too
    on_freed     a reservation or a prefill of this gateway has ended: whoever goes first takes the room
    store_is_up  the store is back: once all gateways have stated their load, those that wait here get seats

Requests go by bands, and in a band the one that waits longest goes first. Nobody overtakes: for a request that goes
before and cannot take room here yet (its seat may still be granted), room is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Literal

import structlog

from coordinator.accounts import AccountLimits, Left
from coordinator.errors import NoRoom, OverBudget
from coordinator.placement import NOTHING, PlaceRequest, Reservation, Used
from coordinator.pool.pool import Pool
from coordinator.pool.prefills import predicted_s
from coordinator.pool.seats import RESTATED_S
from coordinator.redis.wire import has_result
from coordinator.spending import Spent
from coordinator.store import Store
from coordinator.subset import Subset
from gateway.routing.local_limits import TOLD_MS, LocalBuckets, local_budget, local_concurrency
from gateway.routing.local_room import Loads, LocalRoom, choose
from gateway.routing.queue_bounds import why_full
from gateway.routing.rendezvous import CONTENDERS, fallback_order

_log = structlog.get_logger("kvgate.local")

_MOST_HEADS = 64
"""How many requests are tried for nothing until the others have to wait for the next try: each costs some time."""


class _Waiter:
    """A request that waits, here or on a seat."""

    def __init__(self, pool: Pool, request: PlaceRequest, is_new: bool = False) -> None:
        """`is_new`: it was let in here, and the store has not counted it for its limits."""
        assert request.serving is not None
        now_s, since_ms = time.monotonic(), request.standing.since_ms
        since_s = pool.clock.moment_s(since_ms) if since_ms else None
        self.pool, self.request, self.is_new = pool, request, is_new
        self.since_s = now_s - request.waited_s if since_s is None else since_s
        self.answer: asyncio.Future[Reservation | Literal["again"] | None] = asyncio.get_running_loop().create_future()

    @cached_property
    def order(self) -> list[str]:
        """The replicas that may serve it, as they were when it was first tried."""
        request = self.request
        assert request.serving is not None
        order = fallback_order(self.pool.records, request.serving, request.pinned, request.affinity)
        return [replica for replica in order if replica not in request.tried]

    def forget_order(self) -> None:
        """Other replicas may serve it now."""
        self.__dict__.pop("order", None)

    @property
    def turn(self) -> tuple[int, float]:
        """The lowest one goes first."""
        return self.request.standing.band, self.since_s

    @property
    def line(self) -> tuple[object, ...]:
        """If one request of a line finds no room, none does."""
        request = self.request
        assert request.serving is not None
        if len(request.serving.replicas) > CONTENDERS:  # each has replicas of its own
            return (request.reservation,)
        return request.serving.digest, request.pinned, tuple(request.tried), request.room_share


class LocalQueue:
    """One gateway's rule for all its pools while the store does not place."""

    def __init__(self, store: Store, is_suspect: Callable[[str], bool]) -> None:
        """`is_suspect` says whether a replica failed recently for this gateway."""
        self._store, self._is_suspect = store, is_suspect
        self._pools: dict[str, Pool] = {}
        self._waiting: dict[str, _Waiter] = {}
        self._seats: dict[str, dict[str, _Waiter]] = {}
        """By pool: the seats of this gateway, as they were seen last."""
        self._buckets = LocalBuckets()
        self._local: set[str] = set()
        """The pools of which this gateway has said that it admits by its own share."""
        self._will_grant = False
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<LocalQueue {len(self._waiting)} waiting, by own shares: {sorted(self._local)}>"

    def watch(self, pool: Pool) -> None:
        """From now on, hear of what happens in this pool."""
        if pool.name not in self._pools:
            self._pools[pool.name] = pool
            pool.load.on_freed = partial(self._freed, pool)
            pool.seats.on_away = self._grant_all

    def room(self, pool: Pool, request: PlaceRequest) -> LocalRoom:
        """The room of a replica that a request may use while the store is away."""
        if not request.room_share or not pool.seats.can_wait:
            return LocalRoom(0, 0)
        return LocalRoom.of(request.knobs, pool.gateways, request.room_share)

    def would_overtake(self, pool: Pool, request: PlaceRequest) -> bool:
        """Whether it would overtake those that wait here if the store placed it: the store is back, and does not know
        of them and of all load yet."""
        return bool(request.room_share and pool.seats.can_wait and pool.load.waiting and pool.restated_in_s())

    async def place(self, pool: Pool, request: PlaceRequest, is_retry: bool) -> Reservation | Literal["again"] | None:
        """Reserve room for a request that the store did not place, or wait for it; None if no replica is left.
        `again`: the store is back, and is to place it, with the standing that the request has now. Raises NoRoom and
        OverLimit."""
        waiter = _Waiter(pool, request, is_new=not is_retry and not request.waited_s)
        if not waiter.order:
            return None
        self._charge(pool, request, is_retry)
        began_s = time.monotonic()
        self._waiting[request.reservation] = waiter
        pool.load.waiting += 1
        try:
            self._grant(pool)
            if has_result(waiter.answer):
                return waiter.answer.result()
            self._refuse_if_full(waiter)
            self._arm()
            if any(map(self._elsewhere, _limiting(request))):
                asyncio.get_running_loop().call_later(TOLD_MS / 1000, self._grant_all)
            try:
                return await self._wait(waiter)
            finally:
                request.has_waited(request.waited_s + time.monotonic() - began_s)
                request.has_seat(pool.clock.time_ms(waiter.since_s) or request.standing.since_ms)
        finally:
            pool.load.waiting -= 1
            del self._waiting[request.reservation]
            if not has_result(waiter.answer) or not isinstance(waiter.answer.result(), Reservation):
                self._buckets.finish(request.reservation, NOTHING, time.monotonic() * 1000)

    async def _wait(self, waiter: _Waiter) -> Reservation | Literal["again"] | None:
        request = waiter.request
        limit_ms = request.standing.wait_ms
        try:
            async with asyncio.timeout(limit_ms / 1000 - request.waited_s if limit_ms else None):
                return await waiter.answer
        except BaseException as error:
            if has_result(waiter.answer) and isinstance(waiter.answer.result(), Reservation):
                waiter.pool.done(request.reservation, NOTHING)  # granted in the turn in which its client left
            if isinstance(error, TimeoutError):
                raise NoRoom("waited", 0) from None
            raise

    def _refuse_if_full(self, waiter: _Waiter) -> None:
        """Raises NoRoom if too many wait: each gateway has its share of the queue, too, so that all of them have seats
        when the store is back. A request that has waited keeps its place."""
        request, knobs, gateways = waiter.request, waiter.request.knobs, waiter.pool.gateways
        if request.waited_s:
            return
        others = (one.standing for one in self._requests(waiter.pool) if one is not request)
        why = why_full(
            ((one.band, one.tenant) for one in others),
            request.standing.band,
            request.standing.tenant,
            most=max(1, knobs.max_waiting // gateways),
            most_of_tenant=max(1, knobs.max_waiting_per_tenant // gateways),
        )
        if why:
            raise NoRoom(why, 0)

    def _requests(self, pool: Pool) -> Iterable[PlaceRequest]:
        yield from (one.request for one in self._waiting.values() if one.pool is pool)
        yield from pool.seats.requests()

    def send_away(self, reservation: str) -> None:
        """No replica is left for this request, if it waits here."""
        waiter = self._waiting.get(reservation)
        if waiter is not None and not waiter.answer.done():
            waiter.answer.set_result(None)

    def ask_again(self, reservation: str) -> None:
        """Its limits have changed."""
        waiter = self._waiting.get(reservation)
        if waiter is not None and not waiter.answer.done():
            waiter.answer.set_result("again")

    def replicas_changed(self, serving_now: Callable[[PlaceRequest], Subset | None]) -> None:
        """Requests that wait, here or on seats, go to the replicas that serve their models now: `serving_now` tells
        them, None if that is not known."""
        for waiter in self._waiting.values():
            if subset := serving_now(waiter.request):
                waiter.request.is_served_by(subset)
                waiter.forget_order()
        self._seats.clear()
        for pool in self._pools.values():
            pool.replicas_changed(serving_now)
        self._grant_all()

    # -- limits of accounts ------------------------------------------------------------------------------------

    def _charge(self, pool: Pool, request: PlaceRequest, is_retry: bool) -> None:
        """Count what a request takes of its accounts' minutes. Raises OverLimit. A request counts once: a retry takes
        only the tokens that the attempt before gave back, and the store has counted one that had a seat."""
        if (over := self.over_budget(pool, request)) is not None:
            raise over
        limits = request.limits
        if limits is None or request.waited_s:
            return
        now_ms = time.monotonic() * 1000
        if not is_retry:
            self._buckets.let_in(limits, pool.gateways, now_ms)
        tokens = request.prompt_tokens + limits.output_tokens
        self._buckets.reserve(request.reservation, tokens, limits, pool.gateways, now_ms)

    def over_budget(self, pool: Pool, request: PlaceRequest) -> OverBudget | None:
        """Why its budgets leave no room in this gateway's part of them, if so."""
        if request.bill is None:
            return None
        of, is_over = [], False
        sums = [each.reservations.spent for each in self._pools.values()]
        for budget in request.bill.budgets:
            seen = max((known for each in sums if (known := each.seen(budget)) is not None), default=None)
            unsettled = sum(each.unsettled(budget) for each in sums)
            elsewhere = max(each.elsewhere(budget) for each in sums)
            part = local_budget(budget.limit, None if seen is None else seen + elsewhere, pool.gateways)
            others = budget.limit - (seen or 0) - part
            most = request.bill.most(budget, request.prompt_tokens).amount
            spent = Spent("-", seen or 0, others + unsettled)
            is_over = is_over or 0 < most > budget.limit - spent.settled - spent.held
            of.append((budget, spent, most))
        return OverBudget(of, is_local=True) if is_over else None

    def _is_at_limit(self, pool: Pool, request: PlaceRequest) -> bool:
        """Whether an account of it has all the requests in flight that it may have at this gateway."""
        if not pool.seats.can_wait:
            return False
        is_newcomer = request.reservation in self._waiting and not pool.seats.is_away
        for limits in _limiting(request):
            active, limit = self._active(limits.account), limits.concurrency
            if active >= local_concurrency(limit, pool.gateways) or active + self._elsewhere(limits) >= limit:
                return True
            # Others of its requests wait on seats, most likely because it has as many in flight as it may have.
            if is_newcomer and any(
                limits.account == one.account for each in pool.seats.requests() for one in _limiting(each)
            ):
                return True
        return False

    def _active(self, account: str) -> int:
        """The requests in flight that an account has at this gateway."""
        return sum(each.load.of_account.get(account, 0) for each in self._pools.values())

    def _elsewhere(self, limits: AccountLimits) -> int:
        """Those at other gateways, as far as is known."""
        return self._buckets.elsewhere(limits.account, time.monotonic() * 1000)

    def told(self, request: PlaceRequest, left: tuple[Left, ...]) -> None:
        """The store told what is left of the limits of a request's accounts."""
        now_ms = time.monotonic() * 1000
        for limits, of in zip(request.limits.accounts if request.limits else (), left, strict=True):
            self._buckets.told(limits.account, of, self._active(limits.account), now_ms)

    # -- grants ------------------------------------------------------------------------------------------------

    def _freed(self, pool: Pool, reservation: str, used: Used | None) -> None:
        if reservation not in pool.live:
            self._buckets.finish(reservation, used, time.monotonic() * 1000)
        if not self._will_grant and any(each.load.waiting or each.seats.is_away for each in self._pools.values()):
            self._will_grant = True
            asyncio.get_running_loop().call_soon(self._grant_all)

    def _grant_all(self) -> None:
        self._will_grant = False
        for pool in self._pools.values():
            self._grant(pool)

    def _grant(self, pool: Pool) -> None:
        """Let those go that find room, in their order."""
        loads, full = Loads(pool.load), set[tuple[object, ...]]()
        for waiter in self._in_turn(pool):
            request = waiter.request
            if len(full) >= _MOST_HEADS:
                break
            if waiter.line in full or self._is_at_limit(pool, request):
                continue
            room = self.room(pool, request)
            order = [replica for replica in waiter.order if replica in pool.records]
            replica = (
                choose(order, partial(self._is_usable, pool), partial(loads.have_room, room=room)) if order else ""
            )
            if replica is None:
                full.add(waiter.line)
            elif request.reservation not in self._waiting and not pool.seats.is_away:
                loads.keep(replica, request.prompt_tokens)
            else:
                self._hand_out(waiter, replica, room)

    def _in_turn(self, pool: Pool) -> list[_Waiter]:
        before, here = self._seats.get(pool.name, {}), [one for one in self._waiting.values() if one.pool is pool]
        if not here and not pool.seats.is_away:
            self._seats.pop(pool.name, None)
            return []
        seats = {one.reservation: before.get(one.reservation) or _Waiter(pool, one) for one in pool.seats.requests()}
        self._seats[pool.name] = seats
        return sorted((*seats.values(), *(one for one in here if not one.answer.done())), key=lambda one: one.turn)

    def _is_usable(self, pool: Pool, replica: str) -> bool:
        return pool.records[replica].state == "ready" and not self._is_suspect(replica)

    def _hand_out(self, waiter: _Waiter, replica: str, room: LocalRoom) -> None:
        """Reserve for a request that waits. Without a replica, it is placed again."""
        pool, request = waiter.pool, waiter.request
        reservation: Reservation | Literal["again"] = "again"
        if replica and self.over_budget(pool, request) is None:
            reservation = self._reserve(waiter, replica)
        if room.is_bounded and pool.name not in self._local and not self._store.is_up(pool.name):
            self._say_begin(pool, room)
        if request.reservation in self._waiting:
            waiter.answer.set_result(reservation)
        elif isinstance(reservation, Reservation):
            pool.seats.take(reservation)

    def _reserve(self, waiter: _Waiter, replica: str) -> Reservation:
        pool, request = waiter.pool, waiter.request
        tokens = request.prompt_tokens
        others = pool.load.backlog_tokens.get(replica, 0)
        budget, incarnation = request.budget(tokens, int(waiter.is_new)), pool.records[replica].incarnation
        reservation = Reservation(
            request.reservation, replica, incarnation, tokens, request.tip, budget, request.is_streamed
        )
        reservation.bill, reservation.uncached_tokens = request.bill, tokens
        pool.adopt(reservation)
        if not request.is_streamed:  # nobody sees its first token, and there are no heartbeats to end its backlog
            prefill_s = predicted_s(tokens, others, request.knobs.prefill_tokens_per_s)
            asyncio.get_running_loop().call_later(prefill_s, pool.first_token, reservation.id)
        return reservation

    # -- the store comes back ----------------------------------------------------------------------------------

    def store_is_up(self) -> None:
        """Placements go through the store again."""
        self._arm()

    def _arm(self, in_s: float = RESTATED_S) -> None:
        if self._timer is None and (self._waiting or self._local):
            self._timer = asyncio.get_running_loop().call_later(in_s, self._return)

    def _return(self) -> None:
        """Send those that wait here to a store that is up and knows the load, in their order."""
        self._timer = None
        later_s = 0.0
        for name, pool in self._pools.items():
            if not self._store.is_up(name):
                continue  # it says when it is
            if (in_s := pool.restated_in_s()) > 0:
                later_s = max(later_s, in_s)
                continue
            self._say_end(pool)
            here = [one for one in self._waiting.values() if one.pool is pool and not one.answer.done()]
            for waiter in sorted(here, key=lambda one: one.turn):
                waiter.answer.set_result("again")
        if later_s:
            self._arm(later_s)

    def _say_begin(self, pool: Pool, room: LocalRoom) -> None:
        self._local.add(pool.name)
        _log.warning(
            "this gateway admits requests by its own share of the room",
            pool=pool.name,
            gateways=pool.gateways,
            share_requests=room.requests or None,
            share_backlog_tokens=round(room.backlog_tokens) or None,
            reason=self._store.reason,
        )

    def _say_end(self, pool: Pool) -> None:
        if pool.name in self._local:
            self._local.discard(pool.name)
            waiting = sum(one.pool is pool for one in self._waiting.values())
            _log.info("the store admits requests again", pool=pool.name, gateways=pool.gateways, waiting_here=waiting)


def _limiting(request: PlaceRequest) -> list[AccountLimits]:
    """The accounts of a request that limit requests in flight."""
    return [each for each in request.limits.accounts if each.concurrency] if request.limits is not None else []
