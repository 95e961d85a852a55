"""Places one gateway's requests in one pool: chooses a replica, reserves its load, claims the request's chain for it.

`place` is the one awaited call of a request. A placement that comes too late is undone as soon as its reply says what
it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from coordinator.errors import OverBudget, Refused, StoreDown, StoreLate, StoreRefused
from coordinator.placement import NOTHING, Answer, Placement, PlaceRequest, Reservation, Seat, parse_placement
from coordinator.pool.claims import Claims
from coordinator.pool.link import Link
from coordinator.pool.placing_window import PlacingWindow
from coordinator.pool.replicas import Replicas
from coordinator.pool.reservations import Reservations
from coordinator.pool.seats import GONE, LOST, Connect, Seats
from coordinator.pool.subsets import Subsets
from coordinator.redis.time_limit import IN_ALL, LoopLag
from coordinator.redis.wire import Wire, has_result
from coordinator.scripts import Script
from coordinator.spending import Bill
from coordinator.subset import Subset

_WAITING_SHARE = 0.25
"""The part of a placement's budget that it may wait for a place in the window."""
_REPLY_SHARE = 0.25
"""The part of the budget that is left for the reply, after the latest moment for Redis to begin with a placement."""
_QUEUE_SHARE = 0.25
"""If a placement waits in Redis for a longer part of its budget, this gateway sends fewer of them."""
_AGAIN_S, _LONGEST_AGAIN_S = 0.005, 1.0
"""How long a request waits before it is placed again, if its seat was lost; each time twice as long."""
_PATIENT_S = 1.0
"""How long a request that has waited for room may wait to be sent. Many are placed again together."""

Placed = Placement | Reservation | Literal["again"] | None


class Timing(NamedTuple):
    """Of one call of `place`, on the monotonic clock."""

    sent_s: float
    budget_s: float
    left_s: float
    """Of Redis' budget."""
    begin_by_s: float
    """The latest moment for Redis to begin with it."""


class Placer:
    """`connect` is for requests that are queued for room; without it, none is. `reassert` states everything again, when
    the store does not know this gateway or its replicas any more."""

    def __init__(
        self,
        link: Link,
        replicas: Replicas,
        reservations: Reservations,
        claims: Claims,
        *,
        budget_s: float,
        lag: LoopLag,
        connect: Connect | None,
        reassert: Callable[[], None],
    ) -> None:
        self.link, self._replicas, self._reservations, self._claims = link, replicas, reservations, claims
        self._settlements, self._reassert = reservations.settlements, reassert
        self.subsets, self.seats = Subsets(link), Seats(link, connect, self)
        self.budget_s, self.lag = budget_s, lag
        self.window = PlacingWindow(budget_s)
        self.placing: set[str] = set()
        """Reservations of `place` calls whose caller still waits."""

    def __repr__(self) -> str:
        return f"<Placer {len(self.placing)}, {self.window!r}>"

    @property
    def _unanswered(self) -> dict[str, PlaceRequest]:
        """Whether their callers still wait or not. Each has a place in the window."""
        return self._reservations.unanswered

    def kept(self) -> list[str]:
        """What the store may reserve, or hold a seat for, although this gateway does not count it as live."""
        pairs = [each for each in (*self._unanswered.values(), *self.seats.requests()) if each.prefill is not None]
        return [*{*self.placing, *self._unanswered}, *self.seats.names(), *(each.prefill_reservation for each in pairs)]

    def lost(self) -> None:
        """The connection is gone."""
        self.seats.detached()
        unanswered = [*self._unanswered.values()]
        self._claims.lost([*unanswered, *(each.of_prefill() for each in unanswered if each.prefill is not None)])
        self._reservations.lost()
        for reservation in list(self._unanswered):
            self.forget_call(reservation)

    async def place(self, request: PlaceRequest, answer: Answer | str | None = "ask") -> Placed:
        """Choose a replica and reserve; None if no replica of this pool is left; `again` if the request is to be placed
        under another reservation, because its limits have changed while it waited. A Reservation says that this gateway
        has placed it without the store, while it waited. `answer`: what the store has answered already: see routed.py.

        Raises Refused: no room and it may not wait, or has waited too long; a limit or a budget is used up. Raises
        StoreError (down, late, refused): then nothing is reserved in this gateway's name, or the reservation is undone
        as soon as the late reply says what it was. Redis has the budget, and more time if this process itself was late
        lately; the call takes IN_ALL budgets at most. If no replica has room, the request waits for a grant, and makes
        no second call.
        """
        asked_s = time.monotonic()
        began_s, until_s = asked_s - request.waited_s, asked_s + IN_ALL * self.budget_s
        again_s, lacked = _AGAIN_S, ""
        if not self.seats.can_wait:
            request.must_not_wait()
        while True:
            if isinstance(answer, str):
                answer = await self._ask(request, asked_s, until_s, is_last=bool(lacked))
            if isinstance(answer, str):
                lacked = answer
                asked_s = time.monotonic() if lacked == "late" else asked_s
                continue
            if isinstance(answer, Refused):
                self._was_refused(request, answer)
                try:
                    raise answer
                finally:
                    del answer  # held by a frame of its own traceback, it would stay in memory, and its request with it
            if not isinstance(answer, Seat):
                return answer
            granted = await self._granted(request, answer, began_s)
            if not isinstance(granted, str):
                return granted
            if granted != LOST:
                return None if granted == GONE else "again"
            again_s = min(2 * again_s, _LONGEST_AGAIN_S)
            await asyncio.sleep(again_s)
            answer, lacked = "ask", ""

    def _was_refused(self, request: PlaceRequest, refusal: Refused) -> None:
        if isinstance(refusal, OverBudget):
            assert request.bill is not None
            self._reservations.spent.told(request.bill, [spent for _, spent, _ in refusal.of])
            if request.waited_s:  # its seat had reserved of its limits
                self._settlements.soon("done", request.reservation, NOTHING)

    async def _granted(self, request: PlaceRequest, seat: Seat, began_s: float) -> Placement | Reservation | str:
        """Waits for room. A status if the request has to be placed again."""
        wait_ms = request.standing.wait_ms
        limit_s = wait_ms / 1000 - (time.monotonic() - began_s) if wait_ms else None
        request.has_seat(seat.since_ms)
        try:
            return await self.seats.wait(request, seat, limit_s)
        finally:
            request.has_waited(time.monotonic() - began_s)

    async def _ask(
        self, request: PlaceRequest, began_s: float, until_s: float, *, is_last: bool
    ) -> Answer | str | None:
        """Asks the store once. If it does not place the request because it lacks something, it is told that; then the
        status is returned, or a StoreError raised if this was the last try. None if no replica is left. A reply that
        comes after its caller has given up is undone."""
        if request.waited_s:
            wire = await self.enter(_PATIENT_S, time.monotonic() + _PATIENT_S)
            began_s = time.monotonic()
            until_s = began_s + IN_ALL * self.budget_s
        else:
            wire = await self.enter(None, until_s)
        if not self.declare(request):
            self.window.give_back()
            self._reservations.done(request.release)
            return None
        epoch, undo, forget = self.link.epoch, *self._ends(request)
        self.placing.add(request.reservation)
        try:
            timing, reply = self._send(wire, request, began_s, until_s)
            answer = self.heard(wire, timing, await self.reply(reply, undo, forget), request.bill)
            if isinstance(answer, Placement):
                self.accept(request, answer)
        finally:
            self.placing.discard(request.reservation)
        if isinstance(answer, str):
            return self._lacks(request, answer, epoch, is_last=is_last)
        if not isinstance(answer, Placement):
            self._reservations.released(request, is_over=isinstance(answer, Refused))
        return answer

    def _lacks(self, request: PlaceRequest, status: str, epoch: int, *, is_last: bool) -> str | None:
        """The store has not placed a request that it was asked in this epoch: see `_ask`."""
        if status == "none":
            self._reservations.released(request, is_over=True)
            if is_last or not any(map(request.admits, self._replicas.records.values())):
                return None  # else the store has lost replicas that this gateway knows: state them again
        if status == "undeclared" or (status in ("none", "stale") and epoch == self.link.epoch and not is_last):
            self.make_known(request, status)
        if is_last and status == "late":
            raise StoreLate("placements were sent too late", "gateway")
        if is_last:
            raise StoreDown(f"the store does not take this placement: {status}")
        return status

    def make_known(self, request: PlaceRequest, status: str) -> None:
        """The store did not place a request, because it does not know this: it is told."""
        if status == "undeclared":
            assert request.serving is not None
            self.subsets.declare(request.serving)
        elif status in ("none", "stale"):
            self._reassert()

    async def enter(self, limit_s: float | None, until_s: float) -> Wire:
        """Take a place in the window. Returns the connection to send the placement on. Without a limit, a part of the
        budget is one."""
        wire = self.link.placing_wire()
        if not self.window.take():
            await self.window.wait(limit_s or self.lag.extended(self.budget_s) * _WAITING_SHARE, until_s)
            try:
                wire = self.link.placing_wire()  # it may have changed meanwhile
            except StoreDown:
                self.window.give_back()
                raise
        return wire

    def declare(self, request: PlaceRequest) -> bool:
        """Make sure that the store knows the request's subset; False if it is empty."""
        serving = request.serving
        if serving is None:
            serving = Subset.of(self._replicas.records)
            request.is_served_by(serving)
        self.subsets.use(serving)
        if request.prefill is not None:
            self.subsets.use(request.prefill.serving)
        return bool(serving)

    def _ends(self, request: PlaceRequest) -> tuple[Callable[[Any], None], Callable[[], None]]:
        """What is to be done if its reply comes too late, and if it does not come any more."""
        return partial(self.undo_late, request), partial(self.forget_call, request.reservation)

    def _send(
        self, wire: Wire, request: PlaceRequest, began_s: float, until_s: float
    ) -> tuple[Timing, asyncio.Future[Any]]:
        """Sends one placement, which has a place in the window."""
        self.sends(request)
        undo, forget = self._ends(request)
        try:
            timing = self.timing(wire, began_s, until_s)
            script, operands = self._call(wire, request, self.link.clock.time_ms(timing.begin_by_s))
            return timing, wire.run(script, operands, timing.left_s, undo, until_s)
        except BaseException:
            forget()  # it was not sent
            raise

    def _call(self, wire: Wire, request: PlaceRequest, deadline_ms: int) -> tuple[Script, tuple[Any, ...]]:
        """The script that places the request, and what it takes."""
        link, script = self.link, self.link.place_script(request.knobs)
        told = request.operands(script, link.keys, link.gateway, link.epoch, explain=False, deadline_ms=deadline_ms)
        if request.prefill is None:
            return script, told
        count, *placing = told
        pair = wire.script("pair", request.knobs)
        return pair, pair.operands(placing=placing[:count], arguments=placing[count:])

    def timing(self, wire: Wire, began_s: float, until_s: float) -> Timing:
        """Of a call that is sent now. Raises StoreLate if it is too late for it."""
        sent_s, budget_s = time.monotonic(), self.lag.extended(self.budget_s)
        if sent_s >= until_s:
            raise StoreLate("this process was too busy to ask Redis in time", "gateway")
        # The budget limits Redis, not this process: its event loop may be slow before this, and until it writes.
        left_s = budget_s - min(sent_s - began_s, budget_s * _WAITING_SHARE)
        end_s = min(sent_s + left_s + min(wire.write_lag_s, budget_s), until_s)
        return Timing(sent_s, budget_s, left_s, end_s - self.budget_s * _REPLY_SHARE)

    def heard(self, wire: Wire, timing: Timing, answer: Any, bill: Bill | None) -> Answer | str:
        """What `place` has answered to a request with this bill. Raises StoreLate if Redis began with it too late."""
        clock, sent_s, budget_s = self.link.clock, timing.sent_s, timing.budget_s
        placement = parse_placement(answer, bill)
        if isinstance(placement, Seat) and placement.room:
            self._settlements.room(placement.room)
        elif isinstance(placement, Placement):
            queued_until_ms = clock.time_ms(sent_s + wire.write_lag_s + budget_s * _QUEUE_SHARE)
            self.window.was_answered(had_queued=0 < queued_until_ms < placement.placed_ms)
        elif placement == "late":
            clock.heard(answer[1], sent_s, wire.write_lag_s)
            was_busy = wire.write_lag_s > budget_s * _WAITING_SHARE  # this process, and not Redis
            if time.monotonic() >= timing.begin_by_s and not was_busy:
                error = StoreLate("Redis began with a placement after its deadline")
                self.window.was_late(error)
                raise error
        return placement

    async def reply(
        self, reply: asyncio.Future[Any], undo_late: Callable[[Any], None], forget: Callable[[], None]
    ) -> Any:
        """Waits for the reply. Then the call's place in the window is free."""
        try:
            answer = await reply
        except asyncio.CancelledError:
            if has_result(reply):  # cancelled in the turn of the loop in which the reply came
                undo_late(reply.result())
            elif reply.done() and not reply.cancelled() and isinstance(reply.exception(), StoreRefused):
                forget()
            raise
        except StoreLate as late:  # its place in the window is free when the reply comes
            self.window.was_late(late)
            raise
        except StoreRefused:
            forget()
            raise
        forget()
        return answer

    def sends(self, request: PlaceRequest) -> None:
        """A place that has a place in the window is sent."""
        self._unanswered[request.reservation] = request
        if request.bill is not None:
            request.is_covered(self._reservations.spent.cover(request.bill, request.prompt_tokens))

    def forget_call(self, reservation: str) -> None:
        """A place was answered, was not sent, or will not be answered any more: its place in the window is free."""
        request = self._reservations.answered(reservation)
        if request is not None:
            self.window.give_back()
            if request.covered_ms and request.bill is not None:
                self._reservations.spent.uncover(request.bill, request.prompt_tokens, request.covered_ms)

    # -- what becomes of an answer: `seats` calls these, too ---------------------------------------------------

    def accept(self, request: PlaceRequest, placement: Placement) -> None:
        """Somebody wants this placement."""
        if request.prefill is not None and placement.prefill is not None:
            self._keep(request.of_prefill(), placement.prefill)
        self._keep(request, placement)
        if placement.prefill is not None:
            self._reservations.first_token(request.reservation)  # another replica computes its prompt

    def _keep(self, request: PlaceRequest, placement: Placement) -> None:
        self._reservations.released(request)
        where = (placement.replica, placement.incarnation, placement.backlog_tokens)
        budget = request.budget(placement.backlog_tokens)
        reservation = Reservation(request.reservation, *where, request.tip, budget, request.is_streamed)
        reservation.bill, reservation.placed_ms = request.bill, placement.placed_ms
        reservation.uncached_tokens = placement.backlog_tokens
        if request.bill is not None and placement.spent:
            self._reservations.spent.told(request.bill, placement.spent)
        else:
            reservation.covered_ms = request.covered_ms
        self._reservations.keep(reservation)
        if placement.touch or placement.claimed_from:
            first = 0 if placement.touch else placement.claimed_from - 1
            self._claims.hold(placement.replica, request.keys[first:])

    def undo(self, request: PlaceRequest, placement: Placement | Reservation) -> None:
        """Nobody wants this placement any more."""
        if isinstance(placement, Reservation):
            self._reservations.done(placement.id, NOTHING)
            return
        if request.prefill is not None and placement.prefill is not None:
            self.undo(request.of_prefill(), placement.prefill)
        self._reservations.undo(request.reservation)
        self._claims.withdraw(request, placement)

    def undo_late(self, request: PlaceRequest, late_reply: Any) -> None:
        """The caller gave up on this place before its reply came: take back what it did."""
        self.forget_call(request.reservation)
        placement = "refused" if isinstance(late_reply, Exception) else parse_placement(late_reply)
        if isinstance(placement, Placement | Seat):
            self._reservations.was_counted(request)
        if isinstance(placement, Placement):
            self.undo(request, placement)
        elif isinstance(placement, Seat):
            self.seats.leave(request)

    def was_counted(self, request: PlaceRequest) -> None:
        """The store has counted this request for its limits, in another pool."""
        self._reservations.was_counted(request)

    def is_asked(self, reservation: str) -> bool:
        """Whether a placement under this name is on its way, wanted or not."""
        return reservation in self.placing or reservation in self._unanswered

    def forget(self, reservation: str) -> None:
        """The store has granted a seat that this gateway does not know."""
        self._reservations.forget(reservation)
        self._reservations.forget(f"{reservation}p")

    async def explain(self, request: PlaceRequest) -> bytes | None:
        """The decision that `place` would take now, as JSON with every cost term; nothing is written."""
        link = self.link
        for _ in range(2):
            wire = link.required()
            if not self.declare(request):
                return None
            script = link.place_script(request.knobs)
            operands = request.operands(script, link.keys, link.gateway, link.epoch, explain=True)
            reply = await wire.run(script, operands, self.budget_s * 5)
            if reply[0] != b"undeclared":
                break
            self.subsets.forget()
        return bytes(reply[1]) if reply[0] == b"ok" else None
