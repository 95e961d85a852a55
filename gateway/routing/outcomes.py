"""The recent outcomes of this gateway's attempts on one replica. Pure: the clock is passed in.

All gateways share the breakers in the store (coordinator/lua/report.lua). To save calls, a gateway reports successes
only together with the next failure, as a count. While the store is away, each gateway applies the same rule to its own
attempts.

A replica that was busy and well has many successes in the window. If its engine breaks, hundreds of requests would fail
before these are outweighed. So failures in a row, without a success between them, count as if there were none.
"""

from __future__ import annotations

from coordinator import breaker
from gateway.routing.sliding_count import SlidingCount


class ReplicaOutcomes:
    """The outcomes on one replica."""

    __slots__ = ("_bad", "_breaks_in_a_row", "_errors_in_a_row", "_good", "_suspect_until_s")

    def __init__(self) -> None:
        window_s = breaker.WINDOW_MS / 1000
        self._good, self._bad = SlidingCount(window_s), SlidingCount(window_s)
        self._suspect_until_s = 0.0
        self._errors_in_a_row = self._breaks_in_a_row = 0

    def succeeded(self, now_s: float) -> None:
        """Counts an attempt whose answer began, or is whole."""
        self._good.add(now_s)
        self._suspect_until_s = 0.0
        self._errors_in_a_row = 0

    def ended_well(self) -> None:
        """An answer is complete."""
        self._breaks_in_a_row = 0

    def erred(self) -> None:
        """The replica answered with a server error, or not at all. The request may be at fault: see `failed`."""
        self._errors_in_a_row += 1

    @property
    def errs_in_a_row(self) -> bool:
        """Whether it answers one request after the other with an error, or breaks off one answer after the other."""
        return max(self._errors_in_a_row, self._breaks_in_a_row) >= breaker.FAILURES

    def broke_off(self, now_s: float) -> None:
        """An answer broke off after it was counted as a success: takes that back."""
        self._good.add(now_s, -1)
        self._breaks_in_a_row += 1

    def failed(self, now_s: float) -> int:
        """Counts an attempt that failed by the replica's fault. Returns the successes that were not reported to the
        store yet."""
        self._bad.add(now_s)
        bad, good = self._bad.total(now_s), max(0, self._good.total(now_s))
        if bad >= breaker.FAILURES and (self.errs_in_a_row or bad >= breaker.ERROR_RATE * (bad + good)):
            self._suspect_until_s = now_s + breaker.OPEN_MS / 1000
        return max(0, self._good.take_new(now_s))

    def is_suspect(self, now_s: float) -> bool:
        """Whether to avoid the replica while the store is away."""
        return self._suspect_until_s > now_s

    def are_over(self, now_s: float) -> bool:
        """Whether no outcome is recent any more."""
        return not (self.is_suspect(now_s) or self._good.total(now_s) or self._bad.total(now_s))
