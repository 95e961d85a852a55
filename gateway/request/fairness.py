"""Fairness between clients. `FairShares` bounds how much of a quantity one client takes while others want some of it;
`FairTurns` lets waiting clients take turns.

A holder is the name under which units or turns are counted: mostly one client (`admission.holder_of`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

FAIR_FACTOR = 8
"""While other holders have or want units, no holder takes more than this many times the units that are left. This is
the dynamic threshold of shared switch buffers (Choudhury and Hahne, 1998): n greedy holders leave 1 / (1 + 8 n) of the
units free for the next holder."""
WANTED_S = 10.0
"""For this long, a refused holder counts as a holder that wants units."""
_MAX_REMEMBERED = 1024


class FairShares:
    """A limited number of units (requests, bytes), shared by holders. `now_s` is a monotonic clock."""

    def __init__(self, limit: int, now_s: Callable[[], float]) -> None:
        self.limit = limit
        self.taken = 0
        self._now_s = now_s
        self._by_holder: dict[str, int] = {}
        self._refused_s: dict[str, float] = {}
        """When each holder was last refused; the latest refusal is the last entry."""

    def try_take(self, holder: str, count: int) -> bool:
        """Takes `count` units if they are free, and if enough stay free for other holders that want some."""
        held = self._by_holder.get(holder, 0)
        left = self.limit - self.taken - count
        is_greedy = held > 0 and held + count > FAIR_FACTOR * left
        if left < 0 or (is_greedy and self._is_wanted_by_others(holder)):
            self._refuse(holder)
            return False
        self.take(holder, count)
        return True

    def take(self, holder: str, count: int) -> None:
        """Takes `count` units even if that exceeds the limit, because they are in use already."""
        self._by_holder[holder] = self._by_holder.get(holder, 0) + count
        self.taken += count

    def give_back(self, holder: str, count: int) -> None:
        """Gives back `count` units that the holder took."""
        self.taken -= count
        held = self._by_holder[holder] - count
        if held:
            self._by_holder[holder] = held
        else:
            del self._by_holder[holder]

    def _is_wanted_by_others(self, holder: str) -> bool:
        if len(self._by_holder) > 1:
            return True
        since_s = self._now_s() - WANTED_S
        return any(refused_s > since_s for other, refused_s in self._refused_s.items() if other != holder)

    def _refuse(self, holder: str) -> None:
        self._refused_s.pop(holder, None)
        self._refused_s[holder] = self._now_s()
        if len(self._refused_s) > _MAX_REMEMBERED:
            del self._refused_s[next(iter(self._refused_s))]


class FairTurns:
    """Runs `limit` turns at a time. While a holder waits, each other holder starts at most one turn before it, however
    many turns the others wait for."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """In the order in which the holders get their next turn."""

    def __repr__(self) -> str:
        waiting = {holder: len(futures) for holder, futures in self._waiting.items()}
        return f"<FairTurns {self._free} free, waiting: {waiting}>"

    @asynccontextmanager
    async def take(self, holder: str) -> AsyncIterator[None]:
        """Waits for a turn, which lasts until the end of the block. A task that is cancelled stops waiting."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(holder)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, holder: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the task got its turn and was cancelled at the same moment
                self._pass_on()
            else:
                self._leave(holder, turn)
            raise

    def _leave(self, holder: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(holder)
        if queue is not None and turn in queue:  # `_pass_on` may have removed it already
            queue.remove(turn)
            if not queue:
                del self._waiting[holder]

    def _pass_on(self) -> None:
        """Starts the next waiting turn. Without one, the ended turn becomes free."""
        while self._waiting:
            holder = next(iter(self._waiting))
            queue = self._waiting.pop(holder)
            turn = queue.popleft()
            if queue:
                self._waiting[holder] = queue  # now behind all other holders
            if not turn.done():  # a cancelled turn stays in the queue until its task runs
                turn.set_result(None)
                return
        self._free += 1
