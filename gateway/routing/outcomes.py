"""The recent outcomes of this gateway's attempts on one replica. Pure: the clock is passed in.

All gateways share the breakers in the store (coordinator/lua/report.lua). To save calls, a gateway reports successes
only together with the next failure, as a count. While the store is away, each gateway applies the same rule to its own
attempts.

A replica that was busy and well has many successes in the window. If its engine breaks, hundreds of requests would fail
before these are outweighed. So errors in a row, without a success between them, count as if there were none. Only
attempts that were sent after the last success count in a row: many that end at one moment may have one cause, which is
over by then.
"""

from __future__ import annotations

from coordinator import breaker
from gateway.routing.sliding_count import SlidingCount


class _InARow:
    """Failures without a success between them."""

    __slots__ = ("_count", "_ended_s", "_last_s")

    def __init__(self) -> None:
        self._count, self._ended_s, self._last_s = 0, 0.0, 0.0

    def end(self, now_s: float) -> None:
        """A success."""
        self._count, self._ended_s = 0, now_s

    def add(self, sent_s: float, now_s: float) -> None:
        """A failure of an attempt that was sent then."""
        if sent_s > self._ended_s:
            self._count = self._count + 1 if self.is_recent(now_s) else 1
            self._last_s = now_s

    def is_recent(self, now_s: float) -> bool:
        return self._count > 0 and now_s - self._last_s < breaker.WINDOW_MS / 1000

    def is_long(self, now_s: float) -> bool:
        """Whether there are enough to open a breaker."""
        return self._count >= breaker.FAILURES and self.is_recent(now_s)


class ReplicaOutcomes:
    """The outcomes on one replica."""

    __slots__ = ("_bad", "_breaks", "_errors", "_good", "_suspect_until_s")

    def __init__(self) -> None:
        window_s = breaker.WINDOW_MS / 1000
        self._good, self._bad = SlidingCount(window_s), SlidingCount(window_s)
        self._suspect_until_s = 0.0
        self._errors, self._breaks = _InARow(), _InARow()

    def succeeded(self, now_s: float, is_proof: bool = True) -> None:
        """Counts an attempt whose answer began, or is whole. `is_proof`: the engine has worked for it."""
        self._good.add(now_s)
        self._suspect_until_s = 0.0
        if is_proof:
            self._errors.end(now_s)

    def ended_well(self, now_s: float) -> None:
        """An answer is complete."""
        self._breaks.end(now_s)

    def erred(self, sent_s: float, now_s: float) -> None:
        """The replica answered an attempt that was sent then with an error, or broke its connection. The request may be
        at fault: see `failed`."""
        self._errors.add(sent_s, now_s)

    def errs_in_a_row(self, now_s: float) -> bool:
        """Whether it answers one request after the other with an error, or breaks off one answer after the other."""
        return self._errors.is_long(now_s) or self._breaks.is_long(now_s)

    def broke_off(self, sent_s: float, now_s: float) -> None:
        """An answer broke off after it was counted as a success: takes that back."""
        self._good.add(now_s, -1)
        self._breaks.add(sent_s, now_s)

    def failed(self, now_s: float) -> int:
        """Counts an attempt that failed by the replica's fault. Returns the successes that were not reported to the
        store yet."""
        self._bad.add(now_s)
        bad, good = self._bad.total(now_s), max(0, self._good.total(now_s))
        if bad >= breaker.FAILURES and (self.errs_in_a_row(now_s) or bad >= breaker.ERROR_RATE * (bad + good)):
            self._suspect_until_s = now_s + breaker.OPEN_MS / 1000
        return max(0, self._good.take_new(now_s))

    def is_suspect(self, now_s: float) -> bool:
        """Whether to avoid the replica while the store is away."""
        return self._suspect_until_s > now_s

    def are_over(self, now_s: float) -> bool:
        """Whether no outcome is recent any more."""
        recent = self.is_suspect(now_s), self._errors.is_recent(now_s), self._breaks.is_recent(now_s)
        return not (any(recent) or self._good.total(now_s) or self._bad.total(now_s))
