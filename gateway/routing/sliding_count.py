"""Counts events over a sliding window of time. Pure: the clock is passed in."""

from __future__ import annotations

_SLICES = 10


class SlidingCount:
    """A count over the last `window_s` seconds. It may include up to a tenth of that time more."""

    __slots__ = ("_counts", "_slice", "_slice_s", "_taken")

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / _SLICES
        self._counts = [0] * (_SLICES + 1)
        self._taken = [0] * (_SLICES + 1)
        self._slice = 0

    def add(self, now_s: float, by: int = 1) -> None:
        """Counts `by` events now."""
        at = int(now_s / self._slice_s)
        if at != self._slice:
            self._move_to(at)
        self._counts[at % len(self._counts)] += by

    def total(self, now_s: float) -> int:
        """The events in the window."""
        self._move_to(int(now_s / self._slice_s))
        return sum(self._counts)

    def take_new(self, now_s: float) -> int:
        """The events in the window that no earlier call of `take_new` has returned."""
        total = self.total(now_s) - sum(self._taken)
        self._taken = list(self._counts)
        return total

    def _move_to(self, at: int) -> None:
        """Empties the slices that are out of the window."""
        for passed in range(max(self._slice, at - len(self._counts)) + 1, at + 1):
            self._counts[passed % len(self._counts)] = self._taken[passed % len(self._taken)] = 0
        self._slice = at
