"""How often something has happened lately. Pure: the clock is passed in."""

from __future__ import annotations

_SLICES = 10


class Recent:
    """A count over the last `window_s` seconds, and over up to a tenth of that before."""

    __slots__ = ("_counts", "_slice", "_slice_s", "_told")

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / _SLICES
        self._counts = [0] * (_SLICES + 1)
        self._told = [0] * (_SLICES + 1)
        self._slice = 0

    def add(self, now_s: float, by: int = 1) -> None:
        """It has happened `by` times now."""
        at = int(now_s / self._slice_s)
        if at != self._slice:
            self._move_to(at)
        self._counts[at % len(self._counts)] += by

    def total(self, now_s: float) -> int:
        """How often it has happened."""
        self._move_to(int(now_s / self._slice_s))
        return sum(self._counts)

    def untold(self, now_s: float) -> int:
        """How often it has happened since this was asked the last time."""
        total = self.total(now_s) - sum(self._told)
        self._told = list(self._counts)
        return total

    def _move_to(self, at: int) -> None:
        """Empty the slices that have been passed since."""
        for passed in range(max(self._slice, at - len(self._counts)) + 1, at + 1):
            self._counts[passed % len(self._counts)] = self._told[passed % len(self._told)] = 0
        self._slice = at
