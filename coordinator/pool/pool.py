"""One pool's shared state, as one gateway uses it.

The way of a request: `place` chooses a replica, reserves its load and claims the request's chain for it. `first_token`
and `done` give the load back (see settlements.py). Its claims are confirmed or withdrawn (see claims.py). Only `place`
is awaited. Everything else is written behind: sent in order on the same connection, without waiting.

The gateway's live reservations are kept here as well. It states them again whenever the store may have lost them, or
never had them. This repairs calls that were lost with a connection. The reassertion raises the epoch, so the store
refuses a `place` that runs later. Claims are not stated again: those that were lost with a connection are repaired.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from coordinator import breaker
from coordinator.errors import NoRoom, OverLimit, StoreDown, StoreError, StoreLate, StoreRefused
from coordinator.keys import PoolKeys
from coordinator.placement import (
    NOTHING,
    Exhausted,
    Placement,
    PlaceRequest,
    Refusal,
    Reservation,
    Seat,
    Used,
    parse_placement,
)
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.claims import Claims
from coordinator.pool.demand import Held
from coordinator.pool.live_load import LiveLoad
from coordinator.pool.placing_window import PlacingWindow
from coordinator.pool.prefills import Prefills
from coordinator.pool.redis_clock import RedisClock
from coordinator.pool.seats import GONE, RESTATED_S, Seats
from coordinator.pool.settlements import COUNTED_AT_ONCE, Settlements
from coordinator.pool.subsets import Subsets
from coordinator.pool.unpoured_use import UnpouredUse
from coordinator.redis.time_limit import IN_ALL, LoopLag, fail
from coordinator.redis.wire import Reply, Wire, has_result
from coordinator.registry import PoolState, ReplicaFigures, ReplicaRecord, parse_pool_state, still_known
from coordinator.scripts import Script, load
from coordinator.subset import Subset

LEASE_MS = 3000
MAX_GAP_MS = 1000
_WAITING_SHARE = 0.25
"""The part of a placement's budget that it may wait for a place in the window."""
_REPLY_SHARE = 0.25
"""The part of the budget that is left for the reply, after the latest moment for Redis to begin with a placement."""
_QUEUE_SHARE = 0.25
"""If a placement waits in Redis for a longer part of its budget, this gateway sends fewer of them."""
_COUNTED_SOON_S = 0.02
"""After this time the store hears of a request that was placed without it, if its tenant has limits."""
_AGAIN_S, _LONGEST_AGAIN_S = 0.005, 1.0
"""How long a request waits before it is placed again, if its seat was lost; each time twice as long."""
_PATIENT_S = 1.0
"""How long a request that has waited for room may wait to be sent. Many are placed again together."""


def _not_connected() -> StoreDown:
    return StoreDown("the store is not connected")


def _down() -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    fail(future, _not_connected())
    return future


def _stated(one: Reservation) -> tuple[str, str, str, int, str, str]:
    """A reservation as `reassert` and `adopt` take it. Its request counts once."""
    budget, one.budget = one.budget, one.budget and one.budget._replace(requests=0)
    return one.id, one.replica, one.incarnation, one.backlog_tokens, one.tip, budget.text if budget else ""


class Pool:
    """The store's client for one pool."""

    on_news: Callable[[], None] | None = None
    """Called when a heartbeat has told something new of the pool's replicas."""
    _place_of: tuple[PolicyKnobs, Script] | None = None
    """The settings of the last placement, and their script."""

    def __init__(
        self,
        name: str,
        gateway: str,
        budget_s: float,
        does_chores: bool = True,
        namespace: str = "",
        connect: Callable[[Callable[[StoreError], None]], Awaitable[Wire]] | None = None,
        lag: LoopLag | None = None,
    ) -> None:
        """`connect` opens one more connection, which waits for grants; without it, no request waits for room."""
        self.name = name
        self.keys = PoolKeys(name, namespace)
        self.gateway = gateway
        self.does_chores = does_chores
        self.state: PoolState | None = None
        """As of the last heartbeat; None before the first."""
        self.figures = ReplicaFigures({}, {})
        """As `read_figures` read them last."""
        self.records: dict[str, ReplicaRecord] = {}
        """Every replica known to this gateway: from the store, or discovered while the store was away."""
        self.live: dict[str, Reservation] = {}
        """This gateway's requests in flight, by reservation id."""
        self.load, self.held = LiveLoad(), Held()
        self.prefills = Prefills(self.keys, self.live, self.read, self.first_token)
        self.subsets = Subsets(gateway, self.run, self._restate)
        self.settlements, self._unpoured = Settlements(gateway, self.tell), UnpouredUse()
        self.claims = Claims(self.keys, self.tell, self.run, self.read)
        decided = self._accept, self._undo_placement, self._is_asked, self._forget_reservation
        self.seats = Seats(self.keys, gateway, connect, self.tell, *decided)
        self.is_paused = False
        """Whether placements fail at once, though there is a connection: see StoreConnection."""
        self.unreadable: Counter[str] = Counter()
        """Records that could not be read, by key: see repair.py."""
        self.chores_lag_s: float | None = None
        """How far the chores are behind, while this gateway does them: see chores/worker.py."""
        self._budget_s, self._lag = budget_s, lag or LoopLag()
        self._epoch = 0
        self._version = ""
        """Of the state: the next heartbeat tells what has changed since; "" asks for everything."""
        self._has_written = False
        """Whether it changed replicas' records since the last heartbeat: the next one must not tell older ones."""
        self._wire: Wire | None = None
        self._allow_oom, self._stated_s, self.clock = True, -inf, RedisClock()
        self._window = PlacingWindow(budget_s)
        self._placing: set[str] = set()
        """Reservations of `place` calls whose caller still waits."""
        self._unanswered: dict[str, PlaceRequest] = {}
        """Calls of `place`, by reservation, that were sent on this connection and may have claimed keys, whether their
        caller still waits or not. Each has a place in the window."""
        self._counting: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Pool {self.name}, epoch {self._epoch}, {len(self.live)} live, {len(self._placing)} placing>"

    @property
    def is_worker(self) -> bool:
        """Whether this gateway does the pool's chores, as of the last heartbeat."""
        return self.state is not None and self.state.worker == self.gateway

    @property
    def gateways(self) -> int:
        """How many gateways share the replicas, as of the last heartbeat; 1 before the first."""
        return self.state.gateways if self.state is not None else 1

    @property
    def waiting(self) -> int:
        """The requests of this gateway that wait for room."""
        return len(self.seats) + self.load.waiting

    def restated_in_s(self) -> float:
        """How long it takes until all gateways have stated their load to a store that may have lost it."""
        return max(0.0, self._stated_s + RESTATED_S - time.monotonic())

    # -- connection ------------------------------------------------------------------------------------------

    def attach(self, wire: Wire, allow_oom: bool, is_in_cluster: bool = False) -> None:
        """Use a new connection: everything this gateway knows is stated again on it before anything else."""
        self.keys = PoolKeys(self.name, self.keys.namespace, is_in_cluster)
        self._wire, self._allow_oom, self._place_of, self.is_paused = wire, allow_oom, None, False
        self._version = ""  # it may lead to another server, which lacks the last writes
        self.clock.forget()
        self.reassert()
        self.claims.repair()

    def detach(self) -> None:
        """The connection is gone: calls fail at once with StoreDown."""
        self._wire = None
        self.settlements.drop()
        self.seats.detached()
        self.claims.lost(self._unanswered.values())
        self._unpoured.lost = set(self._unanswered)
        for reservation in list(self._unanswered):
            self._forget_call(reservation)

    def reassert(self) -> None:
        """Raise the epoch and state replicas and live reservations again. Sent at once; calls may follow behind it."""
        self.settlements.send()  # before its reservation is stated: the settlement may be that of a late placement
        self.settlements.all_counted()
        self._tell_adopted([])  # before reservations that are over, and so not stated, are dropped
        self.subsets.forget()
        self._has_written = True
        for number, record in enumerate(self.records.values()):
            # With its text it is long, and there may be a thousand replicas.
            state = self.tell if number else self._restate
            state("register", **record.register_arguments(only_if_absent=True))
        self._epoch += 1
        self._stated_s = time.monotonic()
        live = [_stated(one) for one in self.live.values()]
        kept = [*self._placing, *self.seats.names()]
        self._restate("reassert", gateway=self.gateway, epoch=self._epoch, lease_ms=LEASE_MS, kept=kept, live=live)
        self.settlements.room()
        self.seats.attached(self.read)

    def _restate(self, name: str, **arguments: Any) -> None:
        """Send a script with its text: after a NOSCRIPT it would run again, behind calls that it must precede."""
        script = self._script(name)
        operands = script.operands(self.keys, **arguments)
        if self._wire is not None:
            self._wire.send("EVAL", script.text, *operands)

    def _script(self, name: str) -> Script:
        return load(name, self._allow_oom)

    def _place_script(self, knobs: PolicyKnobs) -> Script:
        """Most requests have the same settings; to look the script up by their values takes a microsecond."""
        if self._place_of is None or self._place_of[0] is not knobs:
            self._place_of = knobs, load("place", self._allow_oom, knobs)
        return self._place_of[1]

    def run(self, name: str, **arguments: Any) -> asyncio.Future[Any]:
        """Run one of the scripts, with the arguments that its header declares."""
        script = self._script(name)
        operands = script.operands(self.keys, **arguments)
        return _down() if self._wire is None else self._wire.run(script, operands)

    def tell(self, name: str, on_reply: Reply | None = None, is_urgent: bool = False, /, **arguments: Any) -> None:
        """Run one of the scripts, behind everything that was sent before: see Wire.tell."""
        script = self._script(name)
        operands = script.operands(self.keys, **arguments)
        if self._wire is not None:
            self._wire.tell(script, operands, on_reply, is_urgent)
        elif on_reply is not None:
            on_reply(_not_connected())

    def read(self, *command: Any, at_once: bool = False) -> asyncio.Future[Any]:
        """A plain command, outside the request path; with `at_once` it is on its way before this returns."""
        return _down() if self._wire is None else self._wire.send(*command, at_once=at_once)

    def replicas_changed(self, serving_now: Callable[[PlaceRequest], Subset | None]) -> None:
        """`serving_now` tells the replicas that may serve a request that waits; None if that is not known."""
        if self.seats.follow(self.subsets, serving_now):
            self.settlements.room()

    # -- placing ---------------------------------------------------------------------------------------------

    async def place(self, request: PlaceRequest) -> Placement | Reservation | None:
        """Choose a replica and reserve; None if no replica of this pool is left. The one awaited call of a request.

        Raises StoreError (down, late, refused): then nothing is reserved in this gateway's name, or the reservation is
        undone as soon as the late reply says what it was. Redis has the budget, and more time if this process itself
        was late lately; the call takes IN_ALL budgets at most. If no replica has room, the request waits for a grant,
        and makes no second call; a Reservation says that this gateway has placed it without the store. Raises NoRoom
        if it may not wait, or has waited too long, and OverLimit if its tenant has used up a limit.
        """
        if not self.seats.can_wait:
            request.room_share = 0.0
            request.limits = request.limits and replace(request.limits, concurrency=0)
        began_s, again_s = time.monotonic() - request.waited_s, _AGAIN_S
        while True:
            placement = await self._place(request)
            if isinstance(placement, Exhausted):
                raise OverLimit(placement.limit, placement.wait_ms / 1000, placement.left)
            if isinstance(placement, Refusal):
                raise NoRoom(placement.reason, placement.expected_ms / 1000)
            if not isinstance(placement, Seat):
                return placement
            limit_s = (
                request.standing.wait_ms / 1000 - (time.monotonic() - began_s) if request.standing.wait_ms else None
            )
            request.standing = request.standing._replace(since_ms=placement.since_ms)
            try:
                granted = await self.seats.wait(request, placement, limit_s)
            finally:
                request.waited_s = time.monotonic() - began_s
            if not isinstance(granted, str):
                return granted
            if granted == GONE:
                return None
            again_s = min(2 * again_s, _LONGEST_AGAIN_S)
            await asyncio.sleep(again_s)

    async def _place(self, request: PlaceRequest) -> Placement | Seat | Refusal | Exhausted | None:
        """The answer of the store."""
        began_s = time.monotonic()
        until_s = began_s + IN_ALL * self._budget_s
        for last_try in (False, True):
            if request.waited_s:
                wire = await self._enter(_PATIENT_S, time.monotonic() + _PATIENT_S)
                began_s = time.monotonic()
                until_s = began_s + IN_ALL * self._budget_s
            else:
                wire = await self._enter(None, until_s)
            if not self._declare(request):
                self._window.give_back()
                self.done(request.release)
                return None
            epoch = self._epoch
            self._placing.add(request.reservation)
            try:
                placement = await self._ask(wire, request, began_s, until_s)
                if isinstance(placement, Placement):
                    self._accept(request, placement)
                    return placement
                if isinstance(placement, Seat | Refusal | Exhausted):
                    self._released(request, is_over=not isinstance(placement, Seat))
                    return placement
            finally:
                self._placing.discard(request.reservation)
            if placement == "none":
                self._released(request, is_over=True)
                if last_try or not any(request.admits(record) for record in self.records.values()):
                    return None  # else the store has lost replicas that this gateway knows: state them again
            elif placement == "undeclared":
                assert request.serving is not None
                self.subsets.declare(request.serving)
            elif placement == "late":
                began_s = time.monotonic()
            if placement in ("none", "stale") and epoch == self._epoch and not last_try:
                self.reassert()
        if placement == "late":
            raise StoreLate("placements were sent too late", "gateway")
        raise StoreDown(f"the store does not take this placement: {placement}")

    async def _enter(self, limit_s: float | None, until_s: float) -> Wire:
        """Take a place in the window. Returns the connection to send the placement on. Without a limit, a part of the
        budget is one."""
        wire = self._placing_wire()
        if not self._window.take():
            await self._window.wait(limit_s or self._lag.extended(self._budget_s) * _WAITING_SHARE, until_s)
            try:
                wire = self._placing_wire()  # it may have changed meanwhile
            except StoreDown:
                self._window.give_back()
                raise
        return wire

    def _placing_wire(self) -> Wire:
        if self._wire is None:
            raise _not_connected()
        if self.is_paused:
            raise StoreDown("placements are paused, because the store was late")
        return self._wire

    def _declare(self, request: PlaceRequest) -> bool:
        """Make sure that the store knows the request's subset; False if it is empty."""
        if request.serving is None:
            request.serving = Subset.of(self.records)
        self.subsets.use(request.serving)
        return bool(request.serving)

    def _released(self, request: PlaceRequest, is_over: bool = False) -> None:
        """The store has given back the attempt before. A charge for it ends: the next one is charged for itself. What
        it had reserved of its tenant's limits is the next one's; if the request `is_over`, that ends, too."""
        if request.release:
            self._drop(request.release)
            self.settlements.soon("done", request.release, NOTHING)
            if is_over and request.limits is not None:
                self.settlements.soon("done", request.reservation, NOTHING)
            request.release = ""

    async def _ask(
        self, wire: Wire, request: PlaceRequest, began_s: float, until_s: float
    ) -> Placement | Seat | Refusal | Exhausted | str:
        """The reply to one place, which has a place in the window. A reply that comes after its caller has given up is
        undone."""
        script = self._place_script(request.knobs)
        sent_s, budget_s = time.monotonic(), self._lag.extended(self._budget_s)
        # The budget limits Redis, not this process: its event loop may be slow before this, and until it writes.
        left_s = budget_s - min(sent_s - began_s, budget_s * _WAITING_SHARE)
        end_s = min(sent_s + left_s + min(wire.write_lag_s, budget_s), until_s)
        begin_by_s = end_s - self._budget_s * _REPLY_SHARE
        deadline_ms = self.clock.time_ms(begin_by_s)
        self._unanswered[request.reservation] = request
        try:
            if sent_s >= until_s:
                raise StoreLate("this process was too busy to ask Redis in time", "gateway")
            operands = request.operands(
                script, self.keys, self.gateway, self._epoch, explain=False, deadline_ms=deadline_ms
            )
            reply = wire.run(script, operands, left_s, partial(self._undo, request), until_s)
        except BaseException:
            self._forget_call(request.reservation)  # it was not sent
            raise
        try:
            answer = await reply
        except asyncio.CancelledError:
            if has_result(reply):  # cancelled in the turn of the loop in which the reply came
                self._undo(request, reply.result())
            elif reply.done() and not reply.cancelled() and isinstance(reply.exception(), StoreRefused):
                self._forget_call(request.reservation)
            raise
        except StoreLate as late:  # its place in the window is free when the reply comes
            self._window.was_late(late)
            raise
        except StoreRefused:
            self._forget_call(request.reservation)
            raise
        self._forget_call(request.reservation)
        placement = parse_placement(answer)
        if isinstance(placement, Seat) and placement.room:
            self.settlements.room(placement.room)
        elif isinstance(placement, Placement):
            queued_until_ms = self.clock.time_ms(sent_s + wire.write_lag_s + budget_s * _QUEUE_SHARE)
            self._window.was_answered(had_queued=0 < queued_until_ms < placement.placed_ms)
        elif placement == "late":
            self.clock.heard(answer[1], sent_s, wire.write_lag_s)
            was_busy = wire.write_lag_s > budget_s * _WAITING_SHARE  # this process, and not Redis
            if time.monotonic() >= begin_by_s and not was_busy:
                error = StoreLate("Redis began with a placement after its deadline")
                self._window.was_late(error)
                raise error
        return placement

    def _forget_call(self, reservation: str) -> None:
        """A place was answered, was not sent, or will not be answered any more: its place in the window is free."""
        if self._unanswered.pop(reservation, None) is not None:
            self._window.give_back()

    def _accept(self, request: PlaceRequest, placement: Placement) -> None:
        self._released(request)
        where = (placement.replica, placement.incarnation, placement.backlog_tokens)
        budget = request.budget(placement.backlog_tokens)
        self._keep(Reservation(request.reservation, *where, request.tip, budget, request.is_streamed))
        if placement.touch or placement.claimed_from:
            first = 0 if placement.touch else placement.claimed_from - 1
            self.claims.hold(placement.replica, request.keys[first:])

    def _undo(self, request: PlaceRequest, late_reply: Any) -> None:
        """The caller gave up on this place before its reply came: take back what it did."""
        self._forget_call(request.reservation)
        placement = "refused" if isinstance(late_reply, Exception) else parse_placement(late_reply)
        if isinstance(placement, Placement | Seat):
            self._was_counted(request)
        if isinstance(placement, Placement):
            self._undo_placement(request, placement)
        elif isinstance(placement, Seat):
            self.seats.leave(request)

    def _was_counted(self, request: PlaceRequest) -> None:
        """The store has counted this request for its tenant's limits, although its placement came too late."""
        request.is_counted = True
        self._unpoured.was_counted(request.reservation)
        if (one := self.live.get(request.reservation)) is not None and one.budget is not None:
            one.budget = one.budget._replace(requests=0)

    def _is_asked(self, reservation: str) -> bool:
        """Whether a placement under this name is on its way, wanted or not."""
        return reservation in self._placing or reservation in self._unanswered

    def _forget_reservation(self, reservation: str) -> None:
        """The store reserves for a request that this gateway does not know."""
        if reservation not in self.live:
            self.settlements.soon("done", reservation, NOTHING)

    def _undo_placement(self, request: PlaceRequest, placement: Placement | Reservation) -> None:
        """Nobody wants this placement any more. If its request was adopted and counted since, that has replaced it."""
        if isinstance(placement, Reservation):
            self.done(placement.id, NOTHING)
            return
        reservation = request.reservation
        if reservation in self.settlements.to_adopt:
            self.settlements.soon("done", reservation, NOTHING)
        elif not self.settlements.is_adopted(reservation):
            self._drop(reservation)
            self.settlements.soon("done", reservation, NOTHING)
        self.claims.withdraw(request, placement)

    async def explain(self, request: PlaceRequest) -> bytes | None:
        """The decision that `place` would take now, as JSON with every cost term; nothing is written."""
        for _ in range(2):
            if self._wire is None:
                raise _not_connected()
            if not self._declare(request):
                return None
            script = self._place_script(request.knobs)
            operands = request.operands(script, self.keys, self.gateway, self._epoch, explain=True)
            reply = await self._wire.run(script, operands, self._budget_s * 5)
            if reply[0] != b"undeclared":
                break
            self.subsets.forget()
        return bytes(reply[1]) if reply[0] == b"ok" else None

    def adopt(self, reservation: Reservation) -> None:
        """Count a request that was placed without the store: with the next heartbeat or reassertion. If it is over
        before, the store only hears what it took of its tenant's limits. While a tenant with limits may have too much
        elsewhere, that is told soon."""
        self._keep(reservation)
        self.settlements.to_adopt.add(reservation.id)
        if reservation.budget is not None and self._wire is not None and self._counting is None:
            self._counting = asyncio.get_running_loop().call_later(_COUNTED_SOON_S, self.count_adopted)

    def count_adopted(self) -> None:
        """Send the adopted requests that are not counted yet, together, and what happened to those that are."""
        if self._counting is not None:
            self._counting.cancel()
            self._counting = None
        if self._wire is None:
            return
        adopted = [self.live[one] for one in self.settlements.to_adopt if one in self.live]
        self.settlements.send_of_adopted()  # first: one of them may undo a late placement of an adopted request
        self.settlements.all_counted()
        self._tell_adopted(adopted)

    def _tell_adopted(self, adopted: list[Reservation]) -> None:
        """Tell the store of requests that it has not placed: those in flight, and what others took of limits."""
        spent = self._unpoured.take()
        if not adopted and not spent:
            return
        self._epoch += 1
        for start in range(0, max(len(adopted), len(spent)), COUNTED_AT_ONCE):
            piece = slice(start, start + COUNTED_AT_ONCE)
            stated = [_stated(one) for one in adopted[piece]]
            self._restate("adopt", gateway=self.gateway, epoch=self._epoch, spent=spent[piece], adopted=stated)

    # -- the end of a reservation ----------------------------------------------------------------------------

    def _keep(self, reservation: Reservation) -> None:
        if (before := self.live.get(reservation.id)) is not None:
            self.load.remove(before)
        self.live[reservation.id] = reservation
        self.load.add(reservation)

    def _drop(self, reservation: str, used: Used | None = None) -> bool:
        """Whether it was live."""
        one = self.live.pop(reservation, None)
        if one is None:
            return False
        self.load.remove(one)
        self.load.on_freed(reservation, used)
        return True

    def first_token(self, reservation: str) -> None:
        """The prefill is over: give its backlog back."""
        live = self.live.get(reservation)
        if live is not None and live.backlog_tokens:
            self.load.end_backlog(live)
            live.backlog_tokens = 0
            self.load.on_freed(reservation, None)
            self._settle("first_token", reservation)

    def done(self, reservation: str, used: Used | None = None) -> None:
        """The request is over, however it ended; its client may ask again at once. Harmless when repeated.
        `used` is what it took, if the answer has told."""
        budget = self.live[reservation].budget if reservation in self.live else None
        if self._drop(reservation, used):
            is_new = reservation in self.settlements.to_adopt
            if budget is not None and (is_new or self._wire is None):
                self._unpoured.add(reservation, budget, used, not is_new or reservation in self._unanswered)
            self._settle("done", reservation, used)
            self.settlements.forget(reservation)

    def _settle(self, event: str, reservation: str, used: Used | None = None) -> None:
        if self._wire is not None:
            self.settlements.settle(event, reservation, used)

    # -- replicas --------------------------------------------------------------------------------------------

    def register(self, record: ReplicaRecord, only_if_absent: bool = False) -> asyncio.Future[Any]:
        """Make a replica known, or correct what is known of it; a new incarnation inherits nothing."""
        self.records[record.replica] = record
        self._has_written = True
        registered = self.run("register", **record.register_arguments(only_if_absent))
        self.settlements.room(record.replica)
        return registered

    def change_state(self, replica: str, incarnation: str, before: str, after: str) -> None:
        """Change a replica's state in the registry, if it still has this incarnation and that state."""
        record = self.records.get(replica)
        if record is not None and (record.incarnation, record.state) == (incarnation, before):
            self.records[replica] = replace(record, state=after)
        self._has_written = True
        self.run("mark", replica=replica, incarnation=incarnation, before=before, after=after)
        self.settlements.room(replica)

    def report(self, replica: str, incarnation: str, outcome: str, successes: int = 0, in_a_row: bool = False) -> None:
        """Report to a replica's shared breaker: a `failure`, with the successes not reported yet; or a probe's
        `success`. After failures `in_a_row`, no success before them counts."""
        self.tell(
            "report",
            replica=replica,
            incarnation=incarnation,
            outcome=outcome,
            min_failures=breaker.FAILURES,
            error_rate=0 if in_a_row else breaker.ERROR_RATE,
            window_ms=breaker.WINDOW_MS,
            open_ms=breaker.OPEN_MS,
            successes=successes,
        )
        if outcome == "success":
            self.settlements.room(replica)

    # -- heartbeat -------------------------------------------------------------------------------------------

    async def beat(self, leaving: bool = False) -> PoolState:
        """Renew the lease and learn the pool's state; reassert if the store does not know this gateway any more."""
        self.count_adopted()
        epoch, sent_s = self._epoch, time.monotonic()
        has_written, self._has_written = self._has_written, False
        reply = await self.run(
            "beat",
            gateway=self.gateway,
            epoch=epoch,
            lease_ms=LEASE_MS,
            max_gap_ms=MAX_GAP_MS,
            leaving=leaving,
            does_chores=self.does_chores,
            version=self._version,
            held=self.held.text,
            has_written=has_written,
        )
        state = parse_pool_state(reply, self.state)
        self.clock.heard(state.now_ms, sent_s, self._wire.write_lag_s if self._wire is not None else 0.0)
        if self.state is not None and (not state.known or self.restated_in_s()):
            state = replace(state, gateways=max(state.gateways, self.state.gateways))  # some have not come back yet
        if not state.known and epoch == self._epoch and not leaving:
            self.reassert()
        elif not leaving:
            self.records = still_known(self.records, self.state, state)
        has_news = state.version != self._version
        self.state, self._version = state, state.version
        if state.has_waiting and not leaving:
            self.settlements.room()  # some appears by time alone
        self.seats.use_subsets(self.subsets)
        self.seats.check(self.read)
        self.claims.withdraw_unconfirmed(state)
        self.prefills.end_finished_backlogs(state)
        if has_news and self.on_news is not None:
            self.on_news()
        return state

    async def read_figures(self) -> None:
        """Read the replicas' figures for the metrics. Raises StoreError."""
        k = self.keys
        active, engines = await asyncio.gather(self.read("HGETALL", k.active), self.read("HGETALL", k.engines))
        self.figures = ReplicaFigures.parse(active, engines)
