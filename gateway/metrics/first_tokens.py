"""The times to first token that one gateway has measured since they were last taken, for curves over all gateways."""

from __future__ import annotations


class FirstTokens:
    """Sums, by pool."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, float]] = {}

    def note(self, pool: str, seconds: float) -> None:
        """A streamed answer of this pool has begun, so long after its request came."""
        count, sum_s = self._sums.get(pool, (0, 0.0))
        self._sums[pool] = count + 1, sum_s + seconds

    def take(self, pool: str) -> tuple[int, float]:
        """How many answers have begun, and the sum of their times in seconds. Both are 0 from then on."""
        return self._sums.pop(pool, (0, 0.0))
