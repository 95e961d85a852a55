"""The slice of a budget that one gateway gives out by itself, while much is left of the budget. No I/O.

The store holds a slice as if it were one request in flight (see spending.slice in lua/lib/spending.lua). A request that
fits into what is left of the slice is placed without a question about budgets, and ends without a word about them. The
gateway tells with its heartbeats what has ended, what is in flight on the slice, and how much it wants beyond. What it
has given out is not given out again before that, however little it cost. So what is settled and held is never less than
what was spent and may yet be spent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.spending import Most

_AHEAD_S = 1.0
"""A slice is for what comes in this time, two heartbeats, if as much comes as lately."""
_LEAST_S = 0.25
"""What came in a shorter time says little."""
_WORTH = 4
"""If fewer requests come between two heartbeats, it costs less to ask about each."""
_NOTHING = Most(0, 0, 0)


@dataclass(slots=True)
class Slice:
    """Of one budget in one window, in one pool."""

    limit: int = 0
    """Of the budget."""
    room: Most = _NOTHING
    """What requests may yet take. For a gateway that dies, each of its numbers bounds what they can have cost."""
    half: int = 0
    """So much is left when half of it is used."""
    in_flight: int = 0
    """The most that its requests in flight can cost."""
    _of_prompts: int = 0
    """What they can have cost at the time 0 of the clock, times 1000."""
    _per_s: int = 0
    """How much more they can cost in each second."""
    in_store: int = 0
    """What the store holds for it, as it told last."""
    _begun: Most = _NOTHING
    """What requests would have taken since it was stated last, whether it had room or not."""
    _count: int = 0
    _begun_ms: int = 0
    """Since the first of them."""
    _number: int = 0
    """Of the call that has stated it last."""
    _wanted: Most = _NOTHING

    def begins(self, limit: int, most: Most, now_ms: int) -> bool:
        """A request comes. Whether there is room for it."""
        if limit != self.limit:
            self.limit, self.room = limit, _NOTHING
        if not self._count:
            self._begun_ms = now_ms
        self._begun, self._count = _plus(self._begun, most), self._count + 1
        return self.room.amount > 0 and all(each <= left for each, left in zip(most, self.room, strict=True))

    def take(self, most: Most) -> None:
        """A request gets room."""
        self.room = _plus(self.room, most, -1)

    def hold(self, most: Most, at_ms: int, sign: int = 1) -> None:
        """A request is in flight on it since this time (of any clock that does not jump); -1: not any more."""
        self.in_flight += sign * most.amount
        self._of_prompts += sign * (1000 * most.of_prompt - most.per_s * at_ms)
        self._per_s += sign * most.per_s

    @property
    def is_half_used(self) -> bool:
        return 0 < self.room.amount <= self.half

    @property
    def is_worth(self) -> bool:
        """Whether the store has to be told: it holds something, or should."""
        return bool(self.in_store or self.in_flight or self._count >= _WORTH)

    def begin_anew(self) -> None:
        """A heartbeat is sent: what came before it counts no more."""
        self._begun, self._count = _NOTHING, 0

    def state(self, number: int, now_ms: int) -> str:
        """As `spend` takes it. Until the reply to this call, requests are asked about."""
        took_s = max((now_ms - self._begun_ms) / 1000, _LEAST_S)
        self._wanted = _plus(_NOTHING, self._begun, _AHEAD_S / took_s) if self._count >= _WORTH else _NOTHING
        self.begin_anew()
        self.room, self._number = _NOTHING, number
        known = min(self.in_flight, max(0, -(-(self._of_prompts + self._per_s * now_ms) // 1000)))
        return " ".join(map(str, ("", self.limit, self.in_flight, known, self._per_s, *self._wanted)))

    def heard(self, number: int, is_granted: bool, told_in_flight: int) -> None:
        """The store has answered this call, which had told what is in flight."""
        wanted = self._wanted if is_granted else _NOTHING
        self.in_store = told_in_flight + wanted.amount
        # An older call whose script the store did not know may have run after the last one: nobody knows then.
        self.room = wanted if number == self._number else _NOTHING
        self.half = self.room.amount // 2


def _plus(one: Most, other: Most, times: float = 1) -> Most:
    """Rounded up."""
    return Most(*(each + math.ceil(times * more) for each, more in zip(one, other, strict=True)))
