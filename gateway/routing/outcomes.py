"""The recent outcomes of this gateway's attempts on one replica. Pure: the clock is passed in.

All gateways share the breakers in the store (coordinator/lua/report.lua). To save calls, a gateway reports successes
only together with the next failure, as a count. While the store is away, each gateway applies the same rule to its own
attempts.
"""

from __future__ import annotations

from coordinator.scripts import BreakerKnobs
from gateway.routing.sliding_count import SlidingCount


class ReplicaOutcomes:
    """The outcomes on one replica."""

    __slots__ = ("_bad", "_good", "_knobs", "_suspect_until_s")

    def __init__(self, knobs: BreakerKnobs) -> None:
        window_s = knobs.window_ms / 1000
        self._knobs = knobs
        self._good, self._bad = SlidingCount(window_s), SlidingCount(window_s)
        self._suspect_until_s = 0.0

    def succeeded(self, now_s: float) -> None:
        """Counts an attempt that was answered."""
        self._good.add(now_s)
        self._suspect_until_s = 0.0

    def broke_off(self, now_s: float) -> None:
        """An answer broke off after it was counted as a success: takes that back."""
        self._good.add(now_s, -1)

    def failed(self, now_s: float) -> int:
        """Counts a failed attempt. Returns the successes that were not reported to the store yet."""
        knobs = self._knobs
        self._bad.add(now_s)
        bad, good = self._bad.total(now_s), max(0, self._good.total(now_s))
        if bad >= knobs.failures and bad >= knobs.error_rate * (bad + good):
            self._suspect_until_s = now_s + knobs.open_ms / 1000
        return max(0, self._good.take_new(now_s))

    def is_suspect(self, now_s: float) -> bool:
        """Whether to avoid the replica while the store is away."""
        return self._suspect_until_s > now_s

    def are_over(self, now_s: float) -> bool:
        """Whether no outcome is recent any more."""
        return not (self.is_suspect(now_s) or self._good.total(now_s) or self._bad.total(now_s))
