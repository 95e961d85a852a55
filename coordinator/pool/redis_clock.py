"""Redis' clock, as one gateway estimates it for the deadlines of its placements."""

from __future__ import annotations

import time
from collections import deque

_SAMPLES = 8


class RedisClock:
    """Redis' time in replies that came lately, compared with this process' monotonic clock.

    A reply is old when it arrives, so each sample is behind Redis' clock. The sample that is furthest ahead is the
    best. If Redis' clock goes back, the estimate stays ahead until newer samples have replaced the older ones (some 4
    s). Until then deadlines are too late, and refuse nothing wrongly. If Redis' clock jumps ahead, the next
    placement comes too late: its reply tells the new time, and the placement is repeated.
    """

    def __init__(self) -> None:
        self._offsets_ms: deque[float] = deque(maxlen=_SAMPLES)

    def heard(self, now_ms: int) -> None:
        """A reply with Redis' time has arrived."""
        self._offsets_ms.append(now_ms + 1 - time.monotonic() * 1000)  # Redis cuts its time to whole milliseconds

    def forget(self) -> None:
        """The next reply may come from another server."""
        self._offsets_ms.clear()

    def time_ms(self, at_s: float) -> int:
        """Redis' time at a moment of the monotonic clock; 0 as long as no reply has told it."""
        return int(max(self._offsets_ms) + at_s * 1000) if self._offsets_ms else 0
