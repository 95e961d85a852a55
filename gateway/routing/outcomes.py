"""How a gateway's own attempts on one replica have ended lately. Pure: the clock is passed in.

The breakers that all gateways share are in the store (coordinator/lua/report.lua). To spare calls, a gateway tells the
store of attempts that ended well only beside the next one that failed, as a count. While the store is away, each
gateway goes by the same rule and its own attempts alone.
"""

from __future__ import annotations

from coordinator.scripts import BreakerKnobs
from gateway.routing.recent import Recent


class Outcomes:
    """Of one replica."""

    __slots__ = ("_bad", "_good", "_knobs", "_suspect_until_s")

    def __init__(self, knobs: BreakerKnobs) -> None:
        window_s = knobs.window_ms / 1000
        self._knobs = knobs
        self._good, self._bad = Recent(window_s), Recent(window_s)
        self._suspect_until_s = 0.0

    def succeeded(self, now_s: float) -> None:
        """An attempt was answered."""
        self._good.add(now_s)
        self._suspect_until_s = 0.0

    def broke_off(self, now_s: float) -> None:
        """An attempt that had been answered has failed after all: it is not one that ended well."""
        self._good.add(now_s, -1)

    def failed(self, now_s: float) -> int:
        """An attempt failed. Returns how many ended well that the store was not told of yet."""
        knobs = self._knobs
        self._bad.add(now_s)
        bad, good = self._bad.total(now_s), max(0, self._good.total(now_s))
        if bad >= knobs.failures and bad >= knobs.error_rate * (bad + good):
            self._suspect_until_s = now_s + knobs.open_ms / 1000
        return max(0, self._good.untold(now_s))

    def is_suspect(self, now_s: float) -> bool:
        """Whether requests are better sent elsewhere while the store is away."""
        return self._suspect_until_s > now_s

    def are_over(self, now_s: float) -> bool:
        """Whether nothing of it is recent any more."""
        return not (self.is_suspect(now_s) or self._good.total(now_s) or self._bad.total(now_s))
