"""How long events take from the engine to the map, as an agent measures it. Pure."""

from __future__ import annotations

_WINDOW_S = 15.0
"""Whoever asks every 15 s misses no slow event."""


class EventDelay:
    """The slowest event of the last quarter of a minute or so, and how many transitions were published."""

    def __init__(self) -> None:
        self._transitions = 0
        self._began_s = 0.0
        self._slowest_s, self._slowest_before_s = 0.0, 0.0

    def note(self, delay_s: float, transitions: int, now_s: float) -> None:
        """These transitions are in the map; the oldest of their events happened so long ago."""
        self._turn(now_s)
        self._transitions += transitions
        self._slowest_s = max(self._slowest_s, delay_s)

    def figures(self, now_s: float, untold_s: float = 0.0) -> dict[str, float]:
        """As they stand in the record of the engine's counters. `untold_s`: for so long the map may lack something."""
        self._turn(now_s)
        slowest_s = max(self._slowest_s, self._slowest_before_s, untold_s)
        return {"event_delay_s": round(slowest_s, 4), "key_transitions": self._transitions}

    def _turn(self, now_s: float) -> None:
        if now_s - self._began_s >= _WINDOW_S:
            is_next = now_s - self._began_s < 2 * _WINDOW_S
            self._slowest_before_s, self._slowest_s = self._slowest_s if is_next else 0.0, 0.0
            self._began_s = now_s
