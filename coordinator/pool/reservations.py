"""The load that one gateway has reserved in one pool, until it is given back.

The gateway states its live reservations again whenever the store may have lost them, or never had them. This repairs
calls that were lost with a connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from coordinator.placement import NOTHING, PlaceRequest, Reservation, Used
from coordinator.pool.link import Link
from coordinator.pool.live_load import LiveLoad
from coordinator.pool.settlements import COUNTED_AT_ONCE, Settlements
from coordinator.pool.spent_sums import SpentSums
from coordinator.pool.unpoured_use import UnpouredUse

_COUNTED_SOON_S = 0.02
"""After this time the store hears of a request that was placed without it, if it has limits."""

Stated = tuple[str, str, str, int, str, str]
"""A reservation as `reassert` takes it."""


class Reservations:
    """`first_token` and `done` give load back (see settlements.py)."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.live: dict[str, Reservation] = {}
        """This gateway's requests in flight, by reservation id."""
        self.unanswered: dict[str, PlaceRequest] = {}
        """Placements that were sent on this connection and may have claimed keys, by reservation."""
        self.load = LiveLoad()
        self.spent = SpentSums()
        self.spent.on_lost = lambda: self.restate_spending(is_all=False)
        self.spent.on_due = self._count_soon
        self.settlements, self._unpoured = Settlements(link, self.spent), UnpouredUse()
        self._counting: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Reservations {len(self.live)} live, {len(self.unanswered)} unanswered>"

    def keep(self, reservation: Reservation) -> None:
        """The store has reserved this."""
        if (before := self.live.get(reservation.id)) is not None:
            self.load.remove(before)
            self.spent.hold(before, -1)
        self.live[reservation.id] = reservation
        self.load.add(reservation)
        self.spent.hold(reservation)

    def _drop(self, reservation: str, used: Used | None = None) -> bool:
        """Whether it was live."""
        one = self.live.pop(reservation, None)
        if one is None:
            return False
        self.load.remove(one)
        self.spent.hold(one, -1)
        if one.bill is not None and used is not None:
            self.spent.settle(one.bill, used, bool(one.covered_ms))
        self.load.on_freed(reservation, used)
        return True

    def first_token(self, reservation: str) -> None:
        """The prefill is over: give its backlog back."""
        live = self.live.get(reservation)
        if live is not None and live.backlog_tokens:
            self.load.end_backlog(live)
            live.backlog_tokens = 0
            self.load.on_freed(reservation, None)
            self._settle("first_token", reservation, alone=False)
            if live.is_held_alone:  # without a first token it is free if this gateway dies: the client comes second
                self.settlements.send_of_adopted()
                self._link.flush()

    def computes_itself(self, reservation: str) -> None:
        """Another replica was to compute its prompt, and did not: its own one has all tokens to compute."""
        live = self.live.get(reservation)
        if live is None or live.backlog_tokens or not live.uncached_tokens:
            return
        self.load.remove(live)
        live.backlog_tokens = live.uncached_tokens
        self.load.add(live)
        if self._link.wire is not None:
            self.settlements.send()  # of its backlog, which must not come behind this
            self._tell_adopted([live])

    def moved(self, reservation: str, replica: str, incarnation: str) -> None:
        """Another replica serves the request than the one where it was placed."""
        live = self.live.get(reservation)
        if live is None:
            return
        self.load.remove(live)
        live.replica, live.incarnation = replica, incarnation
        self.load.add(live)
        if self._link.wire is not None:
            self.settlements.send()  # what happened to it before
            self._tell_adopted([live])

    def done(self, reservation: str, used: Used | None = None) -> None:
        """The request is over, however it ended; its client may ask again at once. Harmless when repeated.
        `used` is what it took, if the answer has told."""
        one = self.live.get(reservation)
        if one is not None and self._drop(reservation, used):
            budget = one.budget
            is_new = reservation in self.settlements.to_adopt
            if budget is not None and (is_new or self._link.wire is None):
                self._unpoured.add(reservation, budget, used, not is_new or reservation in self.unanswered)
            self._settle("done", reservation, used, alone=one.is_held_alone)
            self.settlements.forget(reservation)

    def _settle(self, event: str, reservation: str, used: Used | None = None, *, alone: bool) -> None:
        if self._link.wire is not None:
            self.settlements.settle(event, reservation, used, alone=alone)

    def released(self, request: PlaceRequest, is_over: bool = False) -> None:
        """The store has given back the attempt before. A charge for it ends: the next one is charged for itself. What
        it had reserved of limits is the next one's; if the request `is_over`, that ends, too."""
        if request.release:
            self._drop(request.release)
            self.settlements.soon("done", request.release, NOTHING)
            if is_over and request.limits is not None:
                self.settlements.soon("done", request.reservation, NOTHING)
            request.has_released()

    def was_counted(self, request: PlaceRequest) -> None:
        """The store has counted this request for its limits, although its placement came too late."""
        request.has_counted()
        self._unpoured.was_counted(request.reservation)
        if (one := self.live.get(request.reservation)) is not None and one.budget is not None:
            one.budget = one.budget._replace(requests=0)

    def undo(self, reservation: str) -> None:
        """Nobody wants what the store has reserved. If the request was adopted since, it stays; if that was counted, it
        has replaced what the store had reserved."""
        if self.settlements.is_adopted(reservation):
            return
        if reservation not in self.settlements.to_adopt:
            self._drop(reservation)
        self.settlements.soon("done", reservation, NOTHING)

    def answered(self, reservation: str) -> PlaceRequest | None:
        """The placement under this name, if it was on its way, is so no more: what waited for that is told."""
        if reservation in self.settlements.to_adopt or self._unpoured.waits_for(reservation):
            self._count_soon()
        return self.unanswered.pop(reservation, None)

    def forget(self, reservation: str) -> None:
        """The store reserves for a request that this gateway does not know."""
        if reservation not in self.live:
            self.settlements.soon("done", reservation, NOTHING)

    def forget_all(self) -> None:
        """This gateway leaves."""
        self.live.clear()
        self.spent.forget_slices()

    def lost(self) -> None:
        """The connection is gone."""
        self.settlements.drop()
        self._unpoured.lost = set(self.unanswered)

    # -- requests that were placed without the store -----------------------------------------------------------

    def adopt(self, reservation: Reservation) -> None:
        """Count a request that was placed without the store: with the next heartbeat or reassertion. If it is over
        before, the store only hears what it took of limits. While an account may have too much elsewhere, that is told
        soon. Of one whose placement is on its way nothing is told before the reply: it says whether it was counted."""
        reservation.placed_ms = reservation.placed_ms or self._link.clock.time_ms(time.monotonic())
        self.keep(reservation)
        self.settlements.to_adopt.add(reservation.id)
        if reservation.budget is not None or reservation.bill is not None:
            self._count_soon()

    def _count_soon(self) -> None:
        if self._link.wire is not None and self._counting is None:
            self._counting = asyncio.get_running_loop().call_later(_COUNTED_SOON_S, self.count_adopted)

    def count_adopted(self, *, is_beat: bool = False) -> None:
        """Send the adopted requests that are not counted yet, together, and what happened to those that are. With them
        go slices of budgets; with a heartbeat, all that have changed."""
        if self._counting is not None:
            self._counting.cancel()
            self._counting = None
        if self._link.wire is None:
            return
        self.settlements.send_of_adopted()  # first: one of them may undo a late placement of an adopted request
        adopted = [self.live[one] for one in self.settlements.counted(self.unanswered) if one in self.live]
        self._tell_adopted(adopted)
        leased = [one for one in adopted if one.bill is not None]
        pieces = self.spent.take_slices(all_changed=is_beat)
        for sums, heard in pieces or ([("", None)] if leased else []):
            self._link.tell("spend", heard, True, **self._spending(sums, leased))
            leased = []

    def _tell_adopted(self, adopted: list[Reservation]) -> None:
        """Tell the store of requests that it has not placed: those in flight, and what others took of limits."""
        spent = self._unpoured.take(self.unanswered)
        if not adopted and not spent:
            return
        self._link.epoch += 1
        for start in range(0, max(len(adopted), len(spent)), COUNTED_AT_ONCE):
            piece = slice(start, start + COUNTED_AT_ONCE)
            told = {"gateway": self._link.gateway, "epoch": self._link.epoch, "lease_ms": 0, "is_all": False}
            live = [_stated(one) for one in adopted[piece]]
            self._link.restate("reassert", **told, kept=(), spent=spent[piece], live=live)

    def restate_spending(self, kept: Sequence[str] = (), *, is_all: bool = True) -> None:
        """State all that is spent of budgets, and what requests in flight hold. With `is_all`, others hold nothing,
        except those of `kept`."""
        if not self.spent:
            return
        (sums, heard), *others = self.spent.take_all()
        self._link.restate("spend", heard, **self._spending(sums, self.live.values(), kept, is_all=is_all))
        for sums, heard in others:
            self._link.tell("spend", heard, True, **self._spending(sums, ()))

    def _spending(
        self, sums: str, leased: Iterable[Reservation], kept: Sequence[str] = (), *, is_all: bool = False
    ) -> dict[str, Any]:
        """The arguments of `spend`."""
        stated = [
            (one.id, one.bill.lease(one.placed_ms, one.uncached_tokens))
            for one in leased
            if one.bill is not None and not one.covered_ms
        ]
        told = {"gateway": self._link.gateway, "epoch": self._link.epoch, "sums": sums}
        return {**told, "is_all": is_all, "kept": kept, "stated": stated}

    def all_stated(self) -> list[Stated]:
        """All that is live, to be stated again. Sends before what must be known before that."""
        self.settlements.send()  # before its reservation is stated: the settlement may be that of a late placement
        self.settlements.counted(self.unanswered)
        self._tell_adopted([])  # before reservations that are over, and so not stated, are dropped
        to_adopt = self.settlements.to_adopt
        return [_stated(one) for one in self.live.values() if one.id not in to_adopt]


def _stated(one: Reservation) -> Stated:
    """Its request counts once."""
    budget, one.budget = one.budget, one.budget and one.budget._replace(requests=0)
    return one.id, one.replica, one.incarnation, one.backlog_tokens, one.tip, budget.text if budget else ""
