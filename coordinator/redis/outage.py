"""When to log that a server is away, such as Redis: at once, then every 30 s, and when it is back. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SAY_AGAIN_S = 30.0


@dataclass(slots=True)
class Outage:
    """What one process has seen and logged of one server. Times are of any clock that only goes forward."""

    _since_s: float | None = None
    _say_at_s: float = 0.0

    def failed(self, now_s: float) -> int | None:
        """It cannot be reached. Returns for how many seconds so far if this is to be logged now, else None."""
        if self._since_s is None:
            self._since_s = self._say_at_s = now_s
        if now_s < self._say_at_s:
            return None
        self._say_at_s = now_s + SAY_AGAIN_S
        return round(now_s - self._since_s)

    def ended(self, now_s: float) -> int | None:
        """It serves. Returns for how many seconds it was away; None if it was not."""
        if self._since_s is None:
            return None
        away_s, self._since_s = round(now_s - self._since_s), None
        return away_s
