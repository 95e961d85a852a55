"""Redis' clock, as one gateway estimates it for the deadlines of its placements."""

from __future__ import annotations

import time
from collections import deque

_SAMPLES = 8


class RedisClock:
    """How far Redis' clock is ahead of this process' monotonic clock, from replies that tell Redis' time.

    Redis read its clock after the call was sent and before the reply was read. So each reply gives an interval, and the
    last replies together give a small one. If an interval does not overlap with those before it, Redis' clock has
    made a step: they are forgotten.
    """

    def __init__(self) -> None:
        self._intervals_ms: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._ahead_ms: float | None = None

    def heard(self, now_ms: int, sent_s: float, lag_s: float) -> None:
        """Now there is a reply to a call that was sent at `sent_s` (the monotonic clock). It had come some `lag_s`
        before this process' event loop read it."""
        least, most = now_ms - time.monotonic() * 1000, now_ms + 1 - sent_s * 1000  # Redis cuts off parts of a ms
        if not all(low <= most and least <= high for low, high in self._intervals_ms):
            self._intervals_ms.clear()
        self._intervals_ms.append((least, most))
        lows, highs = zip(*self._intervals_ms, strict=True)
        # Near the lower end: a call may wait long in Redis, but its reply comes at once.
        self._ahead_ms = min(max(lows) + lag_s * 1000, *highs)

    def moment_s(self, time_ms: int) -> float | None:
        """The moment of the monotonic clock at a time of Redis; None as long as no reply has told it."""
        return (time_ms - self._ahead_ms) / 1000 if self._ahead_ms is not None else None

    def forget(self) -> None:
        """The next reply may come from another server."""
        self._intervals_ms.clear()
        self._ahead_ms = None

    def time_ms(self, at_s: float) -> int:
        """Redis' time at a moment of the monotonic clock; 0 as long as no reply has told it."""
        return int(self._ahead_ms + at_s * 1000) if self._ahead_ms is not None else 0
