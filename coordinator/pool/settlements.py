"""First tokens and ends of requests, on their way to the store.

Those of one moment go together, because a call with two events costs Redis little more than one. The end of a request
is sent in this turn of the event loop: its client may ask again at once. A first token waits for company for a moment,
unless a budget depends on it.

A request that was placed without the store is adopted: the next heartbeat or reassertion counts it. What happens to it
before is not sent. What happens later goes with a heartbeat: the store was slow then, and an adoption is no more exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container

from coordinator.placement import Used
from coordinator.pool.link import Link
from coordinator.pool.spent_sums import SpentSums

_Settlement = tuple[str, str, str]
"""See lua/settle.lua."""
_COMPANY_S = 0.002
COUNTED_AT_ONCE = 128
"""Requests in a call that adopts or settles them: some 0.5 ms of Redis' time. Placements of others run between the
calls."""


class Settlements:
    """One gateway's settlements in one pool."""

    def __init__(self, link: Link, spent: SpentSums) -> None:
        self._link, self._spent = link, spent
        self.to_adopt: set[str] = set()
        """Live reservations that were placed without the store. The next heartbeat counts them."""
        self._adopted: set[str] = set()
        """Those that a heartbeat or a reassertion has counted."""
        self._of_adopted: list[_Settlement] = []
        """Their settlements, which the next heartbeat sends."""
        self._settled: list[_Settlement] = []
        self._alone: set[str] = set()
        """Those of them for which the store may hold something of budgets, outside of slices."""
        self._ends_soon = False
        self._later: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Settlements {len(self._settled)} to send, {len(self._of_adopted)} with the next heartbeat>"

    def settle(self, event: str, reservation: str, used: Used | None = None, *, alone: bool) -> None:
        """`event` is `first_token` or `done`. `used` is what the request took, if its answer has told. `alone`: the
        store may hold something of budgets for it, outside of slices."""
        if reservation in self.to_adopt:
            return  # not counted; if a late placement counts it, its reply undoes that
        if reservation in self._adopted:
            self._of_adopted.append((event, reservation, "" if used is None else used.text))
            self._alone.add(reservation)
        else:
            self.soon(event, reservation, used, alone=alone)

    def soon(self, event: str, reservation: str, used: Used | None = None, *, alone: bool = True) -> None:
        """The same, whether the reservation was adopted or not."""
        self._settled.append((event, reservation, "" if used is None else used.text))
        if alone:
            self._alone.add(reservation)
        loop = asyncio.get_running_loop()
        if event != "first_token":
            if not self._ends_soon:
                self._ends_soon = True
                loop.call_soon(self.send)
        elif self._later is None:
            self._later = loop.call_later(_COMPANY_S, self.send)

    def room(self, replica: str = "") -> None:
        """There may be room on this replica, or on any: queued requests get it."""
        self.soon("room", replica, alone=False)

    def send(self) -> None:
        """Send what waits, except settlements of adopted requests."""
        self._ends_soon = False
        if self._later is not None:
            self._later.cancel()
            self._later = None
        settled, self._settled = self._settled, []
        for start in range(0, len(settled), COUNTED_AT_ONCE):
            piece = settled[start : start + COUNTED_AT_ONCE]
            sums, heard = self._spent.take()
            alone = self._alone.intersection(reservation for _, reservation, _ in piece)
            self._alone -= alone
            sums = sums or ("-" if alone and self._spent else "")
            self._link.tell("settle", heard, True, gateway=self._link.gateway, sums=sums, settled=piece)

    def send_of_adopted(self) -> None:
        """Send everything."""
        self._settled += self._of_adopted
        self._of_adopted.clear()
        self.send()

    def counted(self, unanswered: Container[str]) -> set[str]:
        """The adopted requests that are being counted now, in their present state: all whose placement is not under
        way."""
        self._of_adopted.clear()
        counted = {one for one in self.to_adopt if one not in unanswered}
        self._adopted |= counted
        self.to_adopt -= counted
        return counted

    def is_adopted(self, reservation: str) -> bool:
        """Whether a heartbeat or a reassertion has counted this request, which was placed without the store."""
        return reservation in self._adopted

    def forget(self, reservation: str) -> None:
        """The request is over, and settled."""
        self.to_adopt.discard(reservation)
        self._adopted.discard(reservation)

    def drop(self) -> None:
        """The connection is gone: what waits is lost. A reassertion will state what is live."""
        for lost in (self._settled, self._of_adopted, self._alone):
            lost.clear()
